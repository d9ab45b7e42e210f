"""Spectra of momentum, and what schedules leave of them by several measures.

A schedule maps each singular value by itself: with ``x_j = sigma_j / (norm_scale * ||M||_F)`` the
result has the singular values ``y_j = p(x_j)``. So every measure of a result follows from the
spectrum of the momentum, without a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from amo_dist import Schedule
from amo_dist.engine.observe import coefficient_table

Spectra: TypeAlias = Mapping[int, Mapping[str, Tensor]]
"""Singular values over the Frobenius norm, float64, by step and name of the matrix."""
Shapes: TypeAlias = Mapping[str, tuple[int, int]]
"""Shape of each matrix, by name."""

MEASURES = ("residual", "distance", "direction")
"""Means over the directions of the short side; see `measures`."""


def momentum_spectra(momenta: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Singular values of matrices over their Frobenius norms, float64, descending, by name."""
    values_by_name = {}
    for name, momentum in momenta.items():
        values = torch.linalg.svdvals(momentum.double())
        values_by_name[name] = values / torch.linalg.vector_norm(values)
    return values_by_name


def images(values: Tensor, schedules: Sequence[Schedule]) -> Tensor:
    """What schedules make of singular values.

    Args:
        values: Over the Frobenius norm, float64, ``(m,)``.
        schedules: Scaled by the Frobenius norm.

    Returns:
        Float64, ``(len(schedules), m)``.
    """
    scales = torch.tensor([s.norm_scale for s in schedules], dtype=torch.float64)
    y = values / scales.unsqueeze(1)
    steps = coefficient_table(schedules)
    for a, b, c in steps.unsqueeze(-1).permute(1, 2, 0, 3):
        square = y.square()
        y = y * (a + square * (b + square * c))
    return y


def measures(y: Tensor) -> Tensor:
    """All `MEASURES` of results, given their singular values.

    - ``residual``: ``mean (y^2 - 1)^2``.
    - ``distance``: ``mean (y - 1)^2``, the squared distance to the polar factor.
    - ``direction``: the same once the result is scaled to the norm of the polar factor,
      ``2 - 2 mean(y) / sqrt(mean(y^2))``.

    Args:
        y: Float64, ``(..., m)``.

    Returns:
        Float64, ``(..., 3)``.
    """
    square = y.square().mean(-1)
    # A result of zeros stays zero: all of each direction is missing.
    root = square.sqrt().clamp(min=1e-300)
    direction = torch.where(square > 0, 2 - 2 * y.mean(-1) / root, 1.0)
    residual, distance = (y.square() - 1).square().mean(-1), (y - 1).square().mean(-1)
    return torch.stack((residual, distance, direction), dim=-1)
