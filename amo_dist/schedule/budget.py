"""How many Newton-Schulz steps each operator type gets, under a budget of steps or of flops.

Types are positions here: curves, costs and allocations are sequences in one common order, and
ties go to the earlier position. Ratios and flops are exact (``Fraction`` and ``int``), because
binary floating point puts half-way budgets on the wrong side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TypeAlias

from amo_dist.config import MOST_STEPS
from amo_dist.schedule.fields import fail

Curve: TypeAlias = Mapping[int, float]
"""Projected error by number of steps."""

_GAIN = 1e-12
"""A transfer must gain more, since float noise could cycle."""


def ns_step_flops(m: int, n: int) -> int:
    """Floating-point operations of one Newton-Schulz step of one ``m x n`` matrix.

    Args:
        m: Rows, at least 1.
        n: Columns, at least 1.

    Returns:
        Flops of its three products, ``2 * min^2 * (2 * max + min)``; a multiply-add counts two.
    """
    short, long = min(m, n), max(m, n)
    return 2 * short * short * (2 * long + short)


def exact_ratio(ratio: float) -> Fraction:
    """A ratio as it was written: ``0.7`` becomes 7/10, not the nearest binary fraction."""
    return Fraction(str(ratio))


def round_half_up(value: Fraction) -> int:
    """The nearest integer; of two, the greater (the built-in ``round`` takes the even one)."""
    return math.floor(value + Fraction(1, 2))


def step_budget(ratio: float, num_types: int, base_steps: int) -> int:
    """The total of steps over all operator types, ``round_half_up(ratio * types * base)``.

    Args:
        ratio: Planned work over that of the uniform schedule; above 0.
        num_types: Number of operator types.
        base_steps: Steps of the uniform schedule.
    """
    return round_half_up(exact_ratio(ratio) * num_types * base_steps)


def flop_budget(ratio: float, costs: Sequence[int], base_steps: int) -> int:
    """The greatest total of flops that is within ``ratio * base_steps * sum(costs)``.

    Args:
        ratio: Planned work over that of the uniform schedule; above 0.
        costs: Flops of one step of all matrices of each type.
        base_steps: Steps of the uniform schedule.
    """
    return math.floor(exact_ratio(ratio) * base_steps * sum(costs))


def relax_range(budget: int, num_types: int, min_steps: int, max_steps: int) -> tuple[int, int]:
    """Widen the range of steps per type, as far as the budget needs it and no farther.

    Args:
        budget: Total of steps.
        num_types: Number of operator types.
        min_steps: Fewest steps asked for.
        max_steps: Most steps asked for.

    Returns:
        The range ``(min_steps, max_steps)`` within which the budget can be met.

    Raises:
        ValueError: Even one step of every type is over the budget, or it takes more than 100.
    """
    check_affordable(budget, num_types)
    if budget > max(max_steps, MOST_STEPS) * num_types:
        fail("budget", budget, f"at most {MOST_STEPS} steps of each of {num_types} operator types")
    return min(min_steps, budget // num_types), max(max_steps, -(-budget // num_types))


def check_affordable(budget: int, one_step_each: int) -> None:
    """Refuse a budget that is below one step of every type, in steps or in flops."""
    if budget < one_step_each:
        fail("budget", budget, f"at least {one_step_each}, one step of every operator type")


def objective(curves: Sequence[Curve], allocation: Sequence[int]) -> float:
    """The summed error of an allocation, correctly rounded."""
    return math.fsum(curve[k] for curve, k in zip(curves, allocation, strict=True))


def weighted_sum(errors: Sequence[float], weights: Sequence[float]) -> float:
    """The sum of errors, each times its weight, correctly rounded."""
    return math.fsum(error * weight for error, weight in zip(errors, weights, strict=True))


def greedy(curves: Sequence[Curve], budget: int, base_steps: int = 5) -> tuple[int, ...]:
    """The passes add, remove and transfer of the AMO paper; ties to the earlier type.

    They reach the least summed error on convex curves only: see `exact` for any.

    Args:
        curves: For each type the projected error at every number of steps it may get. All have
            the same contiguous range of steps, and finite values.
        budget: Steps to hand out, exactly.
        base_steps: Steps of each type at the start.

    Returns:
        The steps of each type, in the order of ``curves``.
    """
    low, high = min(curves[0]), max(curves[0])
    steps, types = [min(max(base_steps, low), high)] * len(curves), range(len(curves))

    def gain(i: int) -> float:
        now = steps[i]
        return curves[i][now] - curves[i][now + 1] if now < high else -math.inf

    def loss(i: int) -> float:
        now = steps[i]
        return curves[i][now - 1] - curves[i][now] if now > low else math.inf

    for _ in range(budget - sum(steps)):
        steps[max(types, key=gain)] += 1
    for _ in range(sum(steps) - budget):
        steps[min(types, key=loss)] -= 1
    # The first of the best pairs, each of a type that takes a step and one that gives it.
    while len(curves) > 1:
        gains, losses = list(map(gain, types)), list(map(loss, types))
        pairs = ((i, j) for i in types for j in types if i != j)
        i, j = max(pairs, key=lambda pair: gains[pair[0]] - losses[pair[1]])
        if not gains[i] - losses[j] > _GAIN:
            break
        steps[i] += 1
        steps[j] -= 1
    return tuple(steps)
