"""Planning by measured residuals as it is defined, and slowly: every allocation is tried."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

from torch import Tensor

from amo_dist.schedule.polar_express import compose
from amo_dist.schedule.types import MatrixInfo, Schedule

S = 1.01
BASE_STEPS, BASE_ELL = 5, 1e-3
STEPS = range(3, 8)
# Ten a decade; 1e-3 exactly is among them.
GRID = sorted({10 ** (-5 + i / 10) for i in range(41) if i != 20} | {BASE_ELL})

Spectra = Mapping[int, Mapping[str, Tensor]]


def mean_squared_residual(schedule: Schedule, values: Tensor) -> float:
    """Of one matrix; ``values`` are its singular values over its Frobenius norm."""
    x = values.double() / schedule.norm_scale
    for a, b, c in schedule.coefficients:
        x = a * x + b * x**3 + c * x**5
    return float(((x**2 - 1) ** 2).mean())


def measured(ell: float, steps: int, spectra: Spectra, names: Sequence[str]) -> float:
    """``R(k, ell)``: the mean over matrices, then over observations."""
    schedule = Schedule(compose(S * ell, steps), norm_scale=S)
    means = [
        sum(mean_squared_residual(schedule, found[name]) for name in names) / len(names)
        for found in spectra.values()
    ]
    return sum(means) / len(means)


def best_curve(spectra: Spectra, names: Sequence[str]) -> dict[int, tuple[float, float]]:
    """By number of steps the least residual over the grid, and its ell; ties to the greater."""
    return {
        k: min(
            ((measured(ell, k, spectra, names), ell) for ell in GRID), key=lambda p: (p[0], -p[1])
        )
        for k in STEPS
    }


def cost(matrix: MatrixInfo) -> int:
    short, long = sorted(matrix.shape)
    return 2 * short * short * (2 * long + short)


def plan(
    spectra: Spectra,
    registry: Sequence[MatrixInfo],
    *,
    ratio: float = 1.0,
    unit: str = "flops",
    group_of: Callable[[MatrixInfo], str] = lambda matrix: matrix.operator_type,
) -> tuple[dict[str, Schedule], float]:
    """A schedule for each matrix, and the objective ``sum_i w_i R_i(k_i)``."""
    groups: dict[str, list[MatrixInfo]] = {}
    for matrix in registry:
        groups.setdefault(group_of(matrix), []).append(matrix)
    curves = [best_curve(spectra, [m.name for m in some]) for some in groups.values()]
    prices = [1 if unit == "steps" else sum(map(cost, some)) for some in groups.values()]
    budget = Fraction(str(ratio)) * BASE_STEPS * sum(prices)
    if unit == "steps":
        budget = Fraction(math.floor(budget + Fraction(1, 2)))
    best, chosen = math.inf, None
    for steps in itertools.product(STEPS, repeat=len(groups)):
        if sum(k * price for k, price in zip(steps, prices, strict=True)) > budget:
            continue
        total = sum(
            len(some) * curve[k][0]
            for some, curve, k in zip(groups.values(), curves, steps, strict=True)
        )
        if total < best:
            best, chosen = total, steps
    assert chosen is not None, "the budget is infeasible"
    schedules = {
        matrix.name: Schedule(compose(S * curve[k][1], k), norm_scale=S)
        for some, curve, k in zip(groups.values(), curves, chosen, strict=True)
        for matrix in some
    }
    return schedules, best
