"""Measurements of momentum: the spectra that AMO plans by, and the residual of the guard."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from amo_dist.distributed.ranks import control_device, max_over
from amo_dist.engine.step import Engine, Step
from amo_dist.kernels.spectrum import distances, spectrum
from amo_dist.schedule.polar_express import SAFETY
from amo_dist.schedule.types import MatrixInfo, Measurement, Schedule

# A residual ``||X X^T - I||_F / sqrt(min(m, n))`` above this is warned of: singular values below
# ``sqrt(2)`` leave at most 1.
GUARD_BOUND = 1.1


def coefficient_table(schedules: Sequence[Schedule]) -> Tensor:
    """Coefficients of schedules, float64 on the CPU, ``(schedules, steps, 3)``."""
    most = max((schedule.num_steps for schedule in schedules), default=0)
    stay = (1.0, 0.0, 0.0)
    rows = [[*s.coefficients, *[stay] * (most - s.num_steps)] for s in schedules]
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


def observe(engine: Engine, step: Step) -> dict[str, Measurement]:
    """Measure the sample of a step, each matrix on the rank that gets it; a collective.

    What the step orthogonalized is gathered once more, in float32: training rounds it to send it.
    If that fails on one rank, all raise when they read their next ballot.

    Args:
        engine: Engine that has run the step.
        step: The step.

    Returns:
        Measurements by name, the same on all ranks, of the matrices that have a spectrum.
    """
    orders = step.orders
    assert orders is not None
    table = orders.candidates
    assert table is not None
    rows: dict[str, list[float]] = {}

    def measure(step: Step, name: str, momentum: Tensor) -> None:
        start, is_exact = time.perf_counter(), engine.config.update_norm == "exact"
        # A composed schedule divides a matrix by SAFETY times its norm.
        row = measure_spectrum(momentum, table, SAFETY, exact_norm=is_exact).tolist()
        step.observe_seconds += time.perf_counter() - start
        if not math.isnan(row[0]):
            rows[name] = row

    for name, momentum in engine.gather_sample(step):
        engine.guarded(step, f"measuring {name}", measure, name, momentum)
    # The maximum over ranks is what one rank has measured, as no measurement is negative. Replicas
    # that do not know of each other measure the same.
    nothing = [0.0] * (2 + len(table))  # ell, whether it is clamped, and errors
    agreed = agreed_maximum([rows.get(name, nothing) for name in orders.sample], engine)
    return {
        name: Measurement(ell, is_clamped == 1, errors)
        for name, (ell, is_clamped, *errors) in zip(orders.sample, agreed, strict=True)
        if ell > 0
    }


def agreed_residual(engine: Engine, step: Step) -> float:
    """The residual of the matrix to check; a collective over the world."""
    own = 0.0 if step.residual is None else step.residual.item()
    return agreed_maximum([[own]], engine)[0][0]


def agreed_maximum(rows: Sequence[Sequence[float]], engine: Engine) -> list[list[float]]:
    """Elementwise maximum over the world, in float64."""
    group = engine.world.group
    values = torch.tensor(rows, dtype=torch.float64, device=control_device(group))
    greatest: list[list[float]] = max_over(values, group).tolist()
    return greatest


def matrix_to_check(registry: Sequence[MatrixInfo], step: int, every: int) -> str | None:
    """The matrix whose residual is measured at a step, counted from 1; None at most steps.

    All take turns by name, one in ``every`` steps. In step 1 it is the largest one, so that a
    device without memory for that is noticed at once.
    """
    if not registry:
        return None
    if step == 1:
        return max(registry, key=lambda matrix: math.prod(matrix.shape)).name
    turn, steps_since = divmod(step, every)
    return registry[(turn - 1) % len(registry)].name if not steps_since else None
