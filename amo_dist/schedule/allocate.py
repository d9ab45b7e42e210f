"""How many Newton-Schulz steps each operator type gets, within a budget of steps or of flops.

Types are positions: curves, costs and allocations are sequences in one common order, and ties go to
the earlier position. Ratios and flops are exact (``Fraction`` and ``int``), because binary floating
point puts half-way budgets on the wrong side.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TypeAlias

# Error by number of steps, over one contiguous range.
Curve: TypeAlias = Mapping[int, float]

# Pairs of flops, rising, and errors, strictly falling: none beats another.
_Front: TypeAlias = list[tuple[int, int]]

# A transfer must gain more, since float noise could cycle.
_GAIN = 1e-12


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


def greedy(curves: Sequence[Curve], budget: int, base_steps: int = 5) -> tuple[int, ...]:
    """The passes add, remove and transfer of the AMO paper; ties to the earlier type.

    They reach the least summed error on convex curves only: see `least_error` for any.

    Args:
        curves: For each type the projected error at every number of steps it may get. All have
            the same range of steps, and finite values.
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


def least_error(curves: Sequence[Curve], budget: int, costs: Sequence[int]) -> tuple[int, ...]:
    """The allocation of least error within a budget; of equal ones the lexicographically smallest.

    A dynamic program over the types: for the types from each on it keeps every pair of flops and
    error that no other beats in both. Sums are of integers, so that comparisons and ties are exact.
    Made for a few dozen types.

    Args:
        curves: For each type the error at every number of steps.
        budget: The most flops. Enough for the fewest steps of all types.
        costs: Flops of one step of each type.
    """
    errors = _as_integers(curves)
    fronts: list[_Front] = [[(0, 0)]]
    for curve, cost in zip(errors[::-1], costs[::-1], strict=True):
        fronts.insert(0, _front(curve, cost, fronts[0], budget))
    best = _within(fronts[0], budget)
    allocation: list[int] = []
    for curve, cost, later in zip(errors, costs, fronts[1:], strict=True):
        k = next(k for k in sorted(curve) if curve[k] + _within(later, budget - k * cost) == best)
        allocation.append(k)
        budget, best = budget - k * cost, best - curve[k]
    return tuple(allocation)


def _front(curve: Mapping[int, int], cost: int, later: _Front, budget: int) -> _Front:
    """Pairs within a budget that a type reaches together with the types after it."""
    points = sorted(
        (flops + k * cost, error + more)
        for k, more in curve.items()
        for flops, error in later
        if flops + k * cost <= budget
    )
    front: _Front = []
    for point in points:
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return front


def _within(front: _Front, budget: int) -> float:
    """The least error within a budget; infinite where nothing is."""
    place = bisect_right(front, (budget, math.inf))
    return front[place - 1][1] if place else math.inf


def _as_integers(curves: Sequence[Curve]) -> list[dict[int, int]]:
    """The same errors times one common power of two: sums and comparisons become exact."""
    ratios = [{k: float(e).as_integer_ratio() for k, e in curve.items()} for curve in curves]
    common = max(d for curve in ratios for _, d in curve.values())
    return [{k: n * (common // d) for k, (n, d) in curve.items()} for curve in ratios]
