"""Measurements of momentum: the spectra that AMO plans by, and the residual of the guard."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain, islice

import torch
from torch import Tensor

from amo_dist.distributed.ranks import sum_over
from amo_dist.engine.world import World
from amo_dist.kernels.spectrum import distances, spectrum
from amo_dist.schedule.types import MatrixInfo, Schedule

GUARD_BOUND = 1.1
"""A residual ``||X X^T - I||_F / sqrt(min(m, n))`` above this is warned of: singular values below
``sqrt(2)`` leave at most 1."""


def coefficient_table(schedules: Sequence[Schedule]) -> Tensor:
    """Coefficients of schedules, float64 on the CPU, ``(schedules, steps, 3)``."""
    most = max((schedule.num_steps for schedule in schedules), default=0)
    stay = (1.0, 0.0, 0.0)
    rows = [[*one.coefficients, *[stay] * (most - one.num_steps)] for one in schedules]
    return torch.tensor(rows, dtype=torch.float64, device="cpu").view(len(rows), most, 3)


def measure_spectrum(
    momentum: Tensor, table: Tensor, norm_scale: float, *, exact_norm: bool
) -> Tensor:
    """What an observation knows of one matrix.

    Args:
        momentum: Shape ``(m, n)``, float32 or float64.
        table: Result of `coefficient_table` for the candidates.
        norm_scale: Factor of the norm by which candidates divide the matrix.
        exact_norm: Whether updates have the norm of an exact polar factor.

    Returns:
        Float64, 1-D: ``ell``; 1 if the absolute tau has moved it, else 0; and the error of each
        candidate. NaN throughout where the matrix has no spectrum.
    """
    ell, sigma, is_clamped = spectrum(momentum)
    errors = distances(sigma / norm_scale, table.to(sigma.device), exact_norm=exact_norm)
    return torch.cat([ell.view(1), ell.new_full((1,), float(is_clamped)), errors])


def agree_on_values(
    measured: Mapping[str, Tensor], names: Sequence[str], world: World, width: int = 1
) -> dict[str, list[float]]:
    """The measurements of all ranks, on every rank; a collective over the world.

    Args:
        measured: Measurements of this rank by matrix name, `width` values each.
        names: Names of the matrices to agree on; the same on every rank.
        world: Knows the rank whose values of a matrix count.
        width: Number of values of a matrix, on every rank.

    Returns:
        By name; the first value is NaN where it was NaN, zero, or not measured, as in a skipped
        step.
    """
    nothing = [0.0] * width
    own = {
        name: value.reshape(-1).tolist()
        for name, value in measured.items()
        if world.rank in world.reporting_ranks[name]
    }
    sent = chain.from_iterable(own.get(name, nothing) for name in names)
    agreed = iter(sum_over(list(sent), world.group))
    values = {name: list(islice(agreed, width)) for name in names}
    return {name: [first or math.nan, *others] for name, (first, *others) in values.items()}


def matrix_to_check(registry: Sequence[MatrixInfo], turn: int) -> str | None:
    """The matrix whose residual is measured at a turn, counted from 1: all take turns by name."""
    return registry[(turn - 1) % len(registry)].name if registry else None
