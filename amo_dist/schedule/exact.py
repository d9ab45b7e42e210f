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


def least_error_of_steps(curves: Sequence[Mapping[int, float]], budget: int) -> tuple[int, ...]:
    """The allocation of least error whose steps sum to ``budget``; lexicographically smallest.

    Args:
        curves: For each type the error at every number of steps, over one contiguous range.
        budget: Steps to hand out; within the range.
    """
    units = [1] * len(curves)
    errors = _as_integers(curves, units)
    # Where a step is worth more than all error of a type, the least error takes all the budget.
    worth = _spread(errors) + 1
    rewarded = [{k: error - worth * k for k, error in curve.items()} for curve in errors]
    return _least_error(rewarded, units, budget, math.inf)


def least_error_of_flops(
    curves: Sequence[Mapping[int, float]], costs: Sequence[int], budget: int
) -> tuple[int, ...]:
    """The allocation of least error within ``budget`` flops; lexicographically smallest.

    A knapsack: hundreds of types of many different costs can take more work than ``MOST_POINTS``.
    Then it is the best allocation found by there, and a warning says how far from the least error
    it can be: no more than the error of one type.

    Args:
        curves: For each type the error at every number of steps, over one contiguous range.
        costs: Flops of one step of each type.
        budget: The most flops; enough for the fewest steps of all types.
    """
    return _least_error(_as_integers(curves, costs), costs, budget, MOST_POINTS)


def _least_error(
    errors: Sequence[_IntegerCurve], costs: Sequence[int], budget: int, points_left: float
) -> tuple[int, ...]:
    """The allocation of least error within a budget, by rounds of no more than so many points."""
    price = _price(errors, costs, budget)
    cheapest = [
        min(error + price * k * cost for k, error in curve.items())
        for curve, cost in zip(errors, costs, strict=True)
    ]
    bound = sum(cheapest) - price * budget
    problem = errors, costs, budget, price, cheapest
    slack = _first_slack(errors)
    # Never empty: at this price the cheapest numbers of steps keep within the budget.
    fronts, _ = _fronts(*problem, slack, math.inf)
    while (distance := fronts[0][1][-1] - bound) > slack:
        # Every allocation of less error than one that is known is within its distance.
        slack = min(slack * _GROWTH, distance)
        wider, points_left = _fronts(*problem, slack, points_left)
        if points_left < 0:
            logger.warning(
                "%d types are too many for the least error under a budget of flops: the plan is "
                "at most %.3g of the error of one type above it",
                *(len(errors), distance / _spread(errors)),
            )
            break
        fronts = wider
    return _first_of_least(errors, costs, budget, fronts)


_Front: TypeAlias = tuple[list[int], list[int]]
"""Flops, rising, and errors, strictly falling: no pair dominates another."""


def _fronts(
    errors: Sequence[_IntegerCurve],
    costs: Sequence[int],
    budget: int,
    price: int,
    cheapest: Sequence[int],
    slack: int,
    points_left: float,
) -> tuple[list[_Front], float]:
    """What the types from i on can reach, for each i, with a loss up to ``slack``.

    A pair that dominates another has no greater loss: slack never drops it and keeps the other.
    Also says how many of ``points_left`` are left; below zero, the fronts are not complete.
    """
    low = min(errors[0])
    # The types before i take at least their fewest steps.
    spent = [0, *accumulate(low * cost for cost in costs)]
    fronts: list[_Front] = [([0], [0])]
    most = slack
    for i in reversed(range(len(errors))):
        most += cheapest[i]
        points_left -= len(fronts[-1][0]) * len(errors[i])
        if points_left < 0:
            break
        pairs = list(zip(*fronts[-1], strict=True))
        points: list[tuple[int, int]] = []
        for k, more in errors[i].items():
            step = k * costs[i]
            least, limit = most - more - price * step, budget - spent[i] - step
            points += [
                (flops + step, error + more)
                for flops, error in pairs
                if flops <= limit and error + price * flops <= least
            ]
        front: _Front = ([], [])
        for flops, error in sorted(points):
            if not front[1] or error < front[1][-1]:
                front[0].append(flops)
                front[1].append(error)
        fronts.append(front)
    return fronts[::-1], points_left


def _first_of_least(
    errors: Sequence[_IntegerCurve], costs: Sequence[int], budget: int, fronts: Sequence[_Front]
) -> tuple[int, ...]:
    best = fronts[0][1][-1]
    chosen: list[int] = []
    for curve, cost, (flops, rests) in zip(errors, costs, fronts[1:], strict=True):
        for k in sorted(curve):
            within = bisect_right(flops, budget - k * cost)
            if within and curve[k] + rests[within - 1] == best:
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


def _spread(errors: Sequence[_IntegerCurve]) -> int:
    return max(max(curve.values()) - min(curve.values()) for curve in errors)


def _first_slack(errors: Sequence[_IntegerCurve]) -> int:
    """Far below one type's errors: a round that finds nothing costs little."""
    return max(_spread(errors) >> 24, 1)
