"""Made-up spectra and what schedules leave of them: for tests of policies, without tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from amo_dist.schedule.observation import Observed
from amo_dist.schedule.types import Schedule

SIZE = 6


def spectrum(ell: float) -> list[float]:
    """Singular values from 1 down to about ``ell`` of their norm, evenly on a logarithmic scale."""
    return [ell ** (i / (SIZE - 1)) for i in range(SIZE)]


def errors_left(
    trials: Sequence[Schedule], sigmas: Sequence[float], exact_norm: bool = False
) -> list[float]:
    """Mean squared residuals by schedule, then mean squared distances to the polar factor."""
    coefficients, norm_scale = _as_tensor(tuple(trials))
    y = torch.tensor(sigmas, dtype=torch.float64)
    y = (y / (norm_scale * torch.linalg.vector_norm(y))).expand(len(trials), -1)
    for a, b, c in coefficients:
        square = y * y
        y = y * (a + square * (b + square * c))
    residuals = (y * y - 1).square().mean(1)
    if exact_norm:
        y = torch.nn.functional.normalize(y, dim=1, eps=0.0) * len(sigmas) ** 0.5
    found: list[float] = torch.cat([residuals, (y - 1).square().mean(1)]).tolist()
    return found


def observed(policy: Any, ell_by_name: Mapping[str, Any]) -> dict[str, Observed]:
    """Observations of matrices of which only ``ell`` is known.

    An ``ell`` that is none comes with NaN, as from a kernel.
    """
    trials = policy.trials()
    return {name: _of_ell(trials, ell) for name, ell in ell_by_name.items()}


def record(policy: Any, step: int, ell_by_name: Mapping[str, Any]) -> None:
    """An observation of such matrices."""
    policy.record(step, observed(policy, ell_by_name))


def _of_ell(trials: tuple[Schedule, ...], ell: Any) -> Observed:
    count = len(trials)
    if type(ell) is not float or not 0 < ell < math.inf:
        return Observed(ell, [math.nan] * count, [math.nan] * count)
    errors = _left_of(trials, ell)
    return Observed(ell, errors[:count], errors[count:])


@functools.lru_cache(maxsize=4096)
def _left_of(trials: tuple[Schedule, ...], ell: float) -> list[float]:
    return errors_left(trials, spectrum(min(ell, 1.0)))


@functools.lru_cache
def _as_tensor(trials: tuple[Schedule, ...]) -> tuple[Tensor, float]:
    """Coefficients ``(steps, 3, trials, 1)``; short schedules end in steps that change nothing."""
    most = max(schedule.num_steps for schedule in trials)
    rows = [
        [*schedule.coefficients, *[(1.0, 0.0, 0.0)] * (most - schedule.num_steps)]
        for schedule in trials
    ]
    (norm_scale,) = {schedule.norm_scale for schedule in trials}
    table = torch.tensor(rows, dtype=torch.float64)
    return table.permute(1, 2, 0).unsqueeze(-1), norm_scale
