"""The ladder of steps by rate against every allocation, and the moves between its rungs."""

from __future__ import annotations

import itertools
import math
import os
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from amo_dist.schedule.ladder import Rung, ladder, one_step_towards, steps_at

EXAMPLES = int(os.environ.get("AMO_EXAMPLES", "100"))
Curves = list[dict[int, float]]

# A coarse grid of errors makes ties common; the other draws exercise full precision.
ERRORS = st.one_of(st.integers(0, 4).map(lambda n: n / 4), st.floats(0, 1, allow_subnormal=False))
COSTS = st.one_of(st.integers(1, 5), st.integers(1, 10**15))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Curves, list[int], tuple[int, ...]]:
    low = draw(st.integers(1, 3))
    steps = range(low, low + draw(st.integers(1, 4)))
    num_types = draw(st.integers(1, 4))
    curves = [{k: draw(ERRORS) for k in steps} for _ in range(num_types)]
    costs = [draw(COSTS) for _ in curves]
    return curves, costs, tuple(draw(st.sampled_from(steps)) for _ in curves)


def flops(steps: tuple[int, ...], costs: list[int]) -> int:
    return sum(k * cost for k, cost in zip(steps, costs, strict=True))


def error(curves: Curves, steps: tuple[int, ...]) -> Fraction:
    return sum((Fraction(c[k]) for c, k in zip(curves, steps, strict=True)), Fraction(0))


@settings(deadline=None, max_examples=EXAMPLES)
@given(
    case=cases(),
    reference=ERRORS,
    tau=st.sampled_from([0.5, 1.0, 2.0, 4.0]),
    rates=st.lists(st.floats(0, 4), max_size=4),
)
def test_a_rung_has_the_fewest_flops_of_all_allocations_within_the_limit(
    case: tuple[Curves, list[int], tuple[int, ...]],
    reference: float,
    tau: float,
    rates: list[float],
) -> None:
    """At every rung's own rate, just above it, and anywhere; else the plan stays."""
    curves, costs, plan = case
    rungs = ladder(curves, costs, plan, reference, tau)
    limit = Fraction(tau) * Fraction(reference)
    tried = [
        *rates,
        *(rung.rate for rung in rungs),
        *(math.nextafter(rung.rate, math.inf) for rung in rungs if rung.rate < 2.0**400),
    ]
    for rate in tried:
        steps = steps_at(rungs, plan, rate)
        cheaper = [
            (flops(other, costs), left, other)
            for other in itertools.product(*curves)
            if flops(other, costs) < flops(plan, costs)
            and Fraction(rate) ** 2 * (left := error(curves, other)) <= limit
        ]
        assert steps == (min(cheaper)[2] if cheaper else plan)
        assert flops(steps, costs) <= flops(plan, costs)
        assert steps == plan or Fraction(rate) ** 2 * error(curves, steps) <= limit


@settings(deadline=None, max_examples=EXAMPLES)
@given(case=cases(), other=st.data())
def test_types_that_need_more_steps_move_first(
    case: tuple[Curves, list[int], tuple[int, ...]], other: st.DataObject
) -> None:
    """One type moves by one step at a time, and the goal is reached in the fewest moves."""
    curves, _, goal = case
    steps = tuple(other.draw(st.sampled_from(sorted(curve))) for curve in curves)
    for left in range(sum(abs(a - b) for a, b in zip(steps, goal, strict=True)), 0, -1):
        rises = any(a < b for a, b in zip(steps, goal, strict=True))
        moved = one_step_towards(steps, goal)
        (change,) = (b - a for a, b in zip(steps, moved, strict=True) if a != b)
        assert change == (1 if rises else -1)
        assert sum(abs(a - b) for a, b in zip(moved, goal, strict=True)) == left - 1
        steps = moved
    assert one_step_towards(steps, goal) == goal


def test_the_steps_are_a_function_of_the_rate_alone() -> None:
    """They fall with it, rise again with it, and are the plan's above the first rung."""
    errors = {2: 0.64, 3: 0.36, 4: 0.09, 5: 0.04}
    rungs = ladder([errors], [1], (5,), errors[5])
    assert [rung.steps for rung in rungs] == [(4,), (3,), (2,)]
    assert [round(rung.rate, 3) for rung in rungs] == [0.667, 0.333, 0.25]
    rates = (3.0, 1.0, 0.5, 0.3, 0.0, 0.3, 1.0, 0.25)
    assert [steps_at(rungs, (5,), rate)[0] for rate in rates] == [5, 5, 4, 3, 2, 3, 5, 2]
    assert ladder([errors], [1], (2,), errors[5]) == ()
    assert ladder([{1: 0.0, 2: 0.0}], [1], (2,), 0.0) == (Rung(2.0**500, (1,)),)


def test_a_rate_has_its_place_where_its_square_is_no_normal_float() -> None:
    curves = [{2: 0.75, 3: 0.5, 4: 0.25}]
    rungs = ladder(curves, [1], [4], 1.0, 1e-322)
    assert [f"{rung.rate:.3e}" for rung in rungs] == ["1.406e-161", "1.148e-161"]
