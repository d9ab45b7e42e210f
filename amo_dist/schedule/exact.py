"""The allocation of least error, exactly, for thousands of types.

A dynamic program over the types, in which only promising parts are kept. A price on the budget
gives a lower bound: with it every type would take its cheapest number of steps, and what an
allocation costs beyond the bound is the sum of what its types lose against that. The least sum is
small where types are many, so that parts above a small slack are dropped; where no allocation is
left, or only worse ones than the slack covers, the slack grows. All of it is in integers: results
and ties are those of the whole program.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TypeAlias

logger = logging.getLogger(__name__)

MOST_POINTS = 10_000_000
"""Work of a plan under flops, in pairs of flops and error: some ten seconds."""
_GROWTH = 4

_IntegerCurve: TypeAlias = Mapping[int, int]

_Front: TypeAlias = list[tuple[int, int]]
"""Pairs of flops, rising, and errors, strictly falling: none dominates another."""


def least_error(
    curves: Sequence[Mapping[int, float]], budget: int, costs: Sequence[int] | None = None
) -> tuple[int, ...]:
    """The allocation of least error within a budget; lexicographically smallest.

    Under flops this is a knapsack: hundreds of types of many different costs can take more work
    than ``MOST_POINTS``. Then it is the best allocation found by there, and a warning says how far
    from the least error it can be: no more than the error of one type.

    Args:
        curves: For each type the error at every number of steps, over one contiguous range.
        budget: Steps, all of which are handed out; with ``costs`` the most flops. Enough for the
            fewest steps of all types.
        costs: Flops of one step of each type.
    """
    units = [1] * len(curves) if costs is None else costs
    errors = _as_integers(curves, units)
    points_left: float = MOST_POINTS
    if costs is None:
        # Where a step is worth more than all error of a type, the least error takes all the budget.
        worth, points_left = _spread(errors) + 1, math.inf
        errors = [{k: error - worth * k for k, error in curve.items()} for curve in errors]
    price, spread = _price(errors, units, budget), _spread(errors)
    losses = [_from_cheapest(*each, price) for each in zip(errors, units, strict=True)]
    # Far below one type's errors: a round that finds nothing costs little.
    slack = max(spread >> 24, 1)
    # Never empty: at this price the cheapest numbers of steps keep within the budget.
    fronts, _ = _fronts(losses, units, budget, price, slack, math.inf)
    while (distance := fronts[0][-1][1] + price * budget) > slack:
        # Every allocation of less error than one that is known is within its distance.
        slack = min(slack * _GROWTH, distance)
        wider, points_left = _fronts(losses, units, budget, price, slack, points_left)
        if points_left < 0:
            logger.warning(
                "%d types are too many for the least error under a budget of flops: the plan is "
                "at most %.3g of the error of one type above it",
                *(len(curves), distance / spread),
            )
            break
        fronts = wider
    return _first_of_least(losses, units, budget, fronts)


def _fronts(
    errors: Sequence[_IntegerCurve],
    costs: Sequence[int],
    budget: int,
    price: int,
    slack: int,
    points_left: float,
) -> tuple[list[_Front], float]:
    """What the types from i on can reach, for each i, with a loss up to ``slack``.

    The loss of a pair is its error and the price of its flops. A pair that dominates another has no
    greater loss: slack never drops it and keeps the other.
    Also says how many of ``points_left`` are left; below zero, the fronts are not complete.
    """
    low = min(errors[0])
    # The types before i take at least their fewest steps.
    spent = [0, *accumulate(low * cost for cost in costs)]
    fronts: list[_Front] = [[(0, 0)]]
    for i in reversed(range(len(errors))):
        points_left -= len(fronts[-1]) * len(errors[i])
        if points_left < 0:
            break
        points: list[tuple[int, int]] = []
        for k, more in errors[i].items():
            step = k * costs[i]
            least, limit = slack - more - price * step, budget - spent[i] - step
            points += [
                (flops + step, error + more)
                for flops, error in fronts[-1]
                if flops <= limit and error + price * flops <= least
            ]
        front: _Front = []
        for point in sorted(points):
            if not front or point[1] < front[-1][1]:
                front.append(point)
        fronts.append(front)
    return fronts[::-1], points_left


def _first_of_least(
    errors: Sequence[_IntegerCurve], costs: Sequence[int], budget: int, fronts: Sequence[_Front]
) -> tuple[int, ...]:
    best = fronts[0][-1][1]
    chosen: list[int] = []
    for curve, cost, front in zip(errors, costs, fronts[1:], strict=True):
        for k in sorted(curve):
            within = bisect_right(front, (budget - k * cost, math.inf))
            if within and curve[k] + front[within - 1][1] == best:
                break
        chosen.append(k)
        budget, best = budget - k * cost, best - curve[k]
    return tuple(chosen)


def _as_integers(
    curves: Sequence[Mapping[int, float]], units: Sequence[int]
) -> list[dict[int, int]]:
    """The same errors times one common power of two: sums and comparisons become exact.

    It is so great that an integer price of a unit can be close to any fraction of an error.
    """
    ratios = [{k: float(e).as_integer_ratio() for k, e in curve.items()} for curve in curves]
    common = max(d for curve in ratios for _, d in curve.values())
    common <<= (max(units) * len(units) * max(curves[0])).bit_length() + 32
    return [{k: n * (common // d) for k, (n, d) in curve.items()} for curve in ratios]


def _price(errors: Sequence[_IntegerCurve], units: Sequence[int], budget: int) -> int:
    """The least price of a unit, from 0 on, at which types that only mind it keep within."""

    def keeps_within(price: int) -> bool:
        spent = 0
        for curve, unit in zip(errors, units, strict=True):
            per_step = price * unit
            spent += unit * min(curve, key=lambda k: (curve[k] + per_step * k, k))
        return spent <= budget

    low, high = 0, _spread(errors) + 1  # at which all take their fewest steps
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if keeps_within(middle) else (middle + 1, high)
    return low


def _from_cheapest(curve: _IntegerCurve, unit: int, price: int) -> dict[int, int]:
    """The errors of a type, moved so that at this price its cheapest number of steps is free.

    The bound on the error of an allocation is then what the budget brings in, ``-price * budget``.
    """
    cheapest = min(error + price * unit * k for k, error in curve.items())
    return {k: error - cheapest for k, error in curve.items()}


def _spread(errors: Sequence[_IntegerCurve]) -> int:
    return max(max(curve.values()) - min(curve.values()) for curve in errors)
