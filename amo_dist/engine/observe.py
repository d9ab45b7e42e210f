"""Measurements of momentum: the spectra that AMO plans by, and the residual of the guard."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain, islice

import torch
from torch import Tensor

from amo_dist.distributed.ranks import check_alike, failure_text, sum_over
from amo_dist.engine.step import Engine, Measurement, Step
from amo_dist.kernels.spectrum import distances, ns_residual, spectrum
from amo_dist.schedule.types import MatrixInfo, Schedule

GUARD_BOUND = 1.1
"""A residual ``||X X^T - I||_F / sqrt(min(m, n))`` above this is warned of: singular values below
``sqrt(2)`` leave at most 1."""


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


def measure_residual(momentum: Tensor, schedule: Schedule, engine: Engine) -> Tensor:
    """Residual of one matrix as training orthogonalizes it, ``(1,)``; NaN for a zero matrix.

    Args:
        momentum: Shape ``(m, n)``, float32 or float64.
        schedule: Schedule of the matrix.
        engine: Engine of the training.
    """
    update = engine.newton_schulz(momentum.to(engine.wire), schedule)
    # A matrix without a gradient is zero, and its residual says nothing.
    is_zero = ~(update != 0).any()
    return ns_residual(update).masked_fill(is_zero, math.nan).view(1)


def observe(engine: Engine, step: Step | None, measurement: Measurement) -> None:
    """Measure matrices after a step, each on the rank that gets it; a collective over the world.

    One reduction brings the values of all ranks together, and whether a rank has failed.

    Args:
        engine: Engine that has run the step.
        step: The step; None if it was skipped, and nothing is measured.
        measurement: Matrices and what to measure of them.

    Raises:
        RuntimeError: On every rank, where measuring has failed on one; names it and its error.
    """
    world = engine.world
    values, failure = ({}, "") if step is None else _measure(engine, step, measurement)
    nothing = [0.0] * measurement.width
    rows = [values.get(name, nothing) for name in measurement.names]
    *summed, num_failed = sum_over([*chain.from_iterable(rows), float(bool(failure))], world.group)
    agreed = iter(summed)
    by_name = {name: list(islice(agreed, measurement.width)) for name in measurement.names}
    measurement.take({name: [ell or math.nan, *errors] for name, (ell, *errors) in by_name.items()})
    if num_failed:
        check_alike("measurements", failure, world.group)


def _measure(
    engine: Engine, step: Step, measurement: Measurement
) -> tuple[dict[str, list[float]], str]:
    """The values that count of this rank, by name, and its first failure."""
    values, failure, world = dict[str, list[float]](), "", engine.world
    for index, momentum in engine.gather_momentum(step, measurement):
        name = engine.parameters.matrices[index].name
        try:
            row = measurement.measure(momentum, step.schedules[index]).tolist()
        except Exception as error:
            if world.group is None:
                raise
            failure = failure or failure_text(f"step {step.number}: measuring {name}", error)
        else:
            if world.rank in world.reporting_ranks[name]:
                values[name] = row
    return values, failure


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
