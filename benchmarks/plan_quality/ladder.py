"""Fewer Newton-Schulz steps as the learning rate falls: a ladder of allocations by rate.

The error of a step is the rate times the error of its direction. As the rate falls, the same error
of the direction moves the weights less, and fewer steps are enough. A ladder is made once, with the
plan, and is a function of the rate alone: where the rate rises again, so do the steps.

Types are positions here, as in `budget`, and rates are multiples of the reference rate, which is
the greatest one up to the plan.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

from amo_dist.schedule import fields
from amo_dist.schedule.exact import _as_integers, _first_of_least, _fronts

_LARGEST = Fraction(2) ** 1000
"""Squared rates stay below it, since allocations without an error allow any rate."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rung(fields.Stored):
    """The allocation for rates from the next rung's up to its own."""

    rate: fields.Float
    """Greatest rate of the rung, over the reference rate."""
    steps: tuple[fields.Steps, ...]
    """Number of steps of each type."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ladder(fields.Stored):
    """The rungs below a plan, and the settings that they were made with."""

    tau: fields.Float
    """Error allowed, in errors of the uniform schedule at the reference rate."""
    min_steps: fields.Steps
    """Fewest steps of a type."""
    rungs: tuple[Rung, ...]
    """Rungs in the order of falling rates and of falling flops."""

    def _check(self, field: str) -> None:
        rates = [rung.rate for rung in self.rungs]
        if rates != sorted(rates, reverse=True):
            fields.fail(f"{field}.rungs", rates, "falling rates")


def ladder(
    curves: Sequence[Mapping[int, float]],
    costs: Sequence[int],
    plan: Sequence[int],
    reference: float,
    tau: float = 1.0,
) -> tuple[Rung, ...]:
    """Allocations of fewest flops whose error is within a limit, for every rate.

    The error of an allocation at a rate is the squared rate times the sum of its errors. The limit
    is ``tau * reference``.

    Args:
        curves: For each type the weighted squared error at every number of steps, over one
            contiguous range.
        costs: Flops of one step of each type.
        plan: Steps of each type above the first rung. Every rung has fewer flops.
        reference: Squared error of the uniform schedule, in the unit of the curves.
        tau: Factor of the error allowed; above 0.

    Returns:
        Rungs in the order of falling rates and of falling flops. Each has the fewest flops of all
        allocations within the limit; of these the least error, then the lexicographically smallest
        steps.
    """
    limit = Fraction(tau) * Fraction(reference)
    flops = sum(k * cost for k, cost in zip(plan, costs, strict=True))
    if flops <= min(curves[0]) * sum(costs):
        return ()
    allocations = frontier(curves, flops - 1, costs)
    errors = (
        sum(Fraction(curve[k]) for curve, k in zip(curves, steps, strict=True))
        for steps in allocations
    )
    rungs = [
        Rung(_greatest_rate(limit, Fraction(error)), steps)
        for error, steps in zip(errors, allocations, strict=True)
    ]
    return tuple(rungs[::-1])


def steps_at(
    rungs: Sequence[Rung], plan: Sequence[int], rate: float, reference: float = 1.0
) -> tuple[int, ...]:
    """The steps of each type at a rate.

    Args:
        rungs: Result of `ladder`.
        plan: Steps of each type above the first rung.
        rate: Learning rate, at least 0.
        reference: Reference rate.
    """
    allowed = (rung.steps for rung in reversed(rungs) if rate <= rung.rate * reference)
    return next(allowed, tuple(plan))


def rates_alike(rungs: Sequence[Rung], rate: float, reference: float = 1.0) -> tuple[float, float]:
    """The rates that have the same steps as this one: above the first, up to the second.

    Args:
        rungs: Argument of `steps_at`.
        rate: Argument of `steps_at`.
        reference: Argument of `steps_at`.
    """
    bounds = [math.inf, *(rung.rate * reference for rung in rungs), -math.inf]
    pairs = itertools.pairwise(bounds)
    return next((low, high) for high, low in pairs if low < rate <= high)


def one_step_towards(steps: Sequence[int], goal: Sequence[int]) -> tuple[int, ...]:
    """The allocation after one type has moved by one step.

    Types that need more steps move first, so that the error stays within that of the goal. The
    earlier position moves first.
    """
    gaps = [wanted - k for k, wanted in zip(steps, goal, strict=True)]
    place = next((i for sign in (1, -1) for i, gap in enumerate(gaps) if gap * sign > 0), None)
    if place is None:
        return tuple(steps)
    sign = 1 if gaps[place] > 0 else -1
    return (*steps[:place], steps[place] + sign, *steps[place + 1 :])


def _greatest_rate(limit: Fraction, error: Fraction) -> float:
    """The greatest float whose square, times the error, is within the limit."""
    square = min(limit / error, _LARGEST) if error else _LARGEST
    # The root of an integer, as a float of the square may be 0: in units of the least float.
    root = Fraction(math.isqrt(math.floor(square * 4**1074)), 2**1074)
    rate = math.nextafter(float(root), math.inf)
    while Fraction(rate) ** 2 > square:
        rate = math.nextafter(rate, 0.0)
    return rate


def frontier(
    curves: Sequence[Mapping[int, float]], budget: int, costs: Sequence[int]
) -> list[tuple[int, ...]]:
    """The allocations that no other beats in both flops and error, in the order of rising flops.

    Args:
        curves: Argument of `least_error`.
        budget: Argument of `least_error`.
        costs: Argument of `least_error`.

    Returns:
        Of equal flops and equal error the lexicographically smallest.
    """
    errors = _as_integers(curves)
    fronts = _fronts(errors, costs, budget)
    return [_first_of_least(errors, costs, flops, fronts) for flops, _ in fronts[0]]
