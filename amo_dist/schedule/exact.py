"""The best allocation of Newton-Schulz steps, exactly: a dynamic program over the types.

For the types from each on it keeps every pair of flops and error that no other beats in both. Sums
are of integers, so that comparisons and ties are exact. Made for a few dozen types.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TypeAlias

_Front: TypeAlias = list[tuple[int, int]]
"""Pairs of flops, rising, and errors, strictly falling: none beats another."""


def least_error(
    curves: Sequence[Mapping[int, float]], budget: int, costs: Sequence[int]
) -> tuple[int, ...]:
    """The allocation of least error within a budget; of equal ones the lexicographically smallest.

    Args:
        curves: For each type the error at every number of steps, over one contiguous range.
        budget: The most flops. Enough for the fewest steps of all types.
        costs: Flops of one step of each type.
    """
    errors = _as_integers(curves)
    return _first_of_least(errors, costs, budget, _fronts(errors, costs, budget))


def _fronts(errors: Sequence[Mapping[int, int]], costs: Sequence[int], budget: int) -> list[_Front]:
    """Reach of the types from i on, for each i, while those before take their fewest steps."""
    fewest = min(errors[0])
    spent = [0, *accumulate(fewest * cost for cost in costs)]
    fronts: list[_Front] = [[(0, 0)]]
    for curve, cost, before in zip(errors[::-1], costs[::-1], spent[-2::-1], strict=True):
        limit = budget - before
        points = sorted(
            (flops + k * cost, error + more)
            for k, more in curve.items()
            for flops, error in fronts[-1]
            if flops + k * cost <= limit
        )
        front: _Front = []
        for point in points:
            if not front or point[1] < front[-1][1]:
                front.append(point)
        fronts.append(front)
    return fronts[::-1]


def _first_of_least(
    errors: Sequence[Mapping[int, int]], costs: Sequence[int], budget: int, fronts: list[_Front]
) -> tuple[int, ...]:
    """The lexicographically smallest allocation of least error within a budget."""
    best = _within(fronts[0], budget)
    chosen: list[int] = []
    for curve, cost, front in zip(errors, costs, fronts[1:], strict=True):
        k = next(k for k in sorted(curve) if curve[k] + _within(front, budget - k * cost) == best)
        chosen.append(k)
        budget, best = budget - k * cost, best - curve[k]
    return tuple(chosen)


def _within(front: _Front, budget: int) -> float:
    """The least error within a budget; infinite where nothing is."""
    place = bisect_right(front, (budget, math.inf))
    return front[place - 1][1] if place else math.inf


def _as_integers(curves: Sequence[Mapping[int, float]]) -> list[dict[int, int]]:
    """The same errors times one common power of two: sums and comparisons become exact."""
    ratios = [{k: float(e).as_integer_ratio() for k, e in curve.items()} for curve in curves]
    common = max(d for curve in ratios for _, d in curve.values())
    return [{k: n * (common // d) for k, (n, d) in curve.items()} for curve in ratios]
