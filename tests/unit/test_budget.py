from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amo_dist.schedule.budget import (
    allocate,
    flop_budget,
    ns_step_flops,
    objective,
    relax_range,
    round_half_up,
    step_budget,
)

Curves = list[dict[int, float]]

# A coarse grid of errors makes ties common; the other draws exercise full precision.
ERRORS = st.one_of(st.integers(0, 4).map(lambda n: n / 4), st.floats(0, 1, allow_subnormal=False))


@st.composite
def curves(draw: st.DrawFn, max_types: int = 5) -> Curves:
    low = draw(st.integers(1, 4))
    ks = range(low, low + draw(st.integers(1, 4)))
    num_types = draw(st.integers(1, max_types))
    return [{k: draw(ERRORS) for k in ks} for _ in range(num_types)]


def exact_cost(found: Curves, allocation: tuple[int, ...]) -> Fraction:
    return sum((Fraction(c[k]) for c, k in zip(found, allocation, strict=True)), Fraction(0))


def brute_force(found: Curves, candidates: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Least exact cost, then lexicographically smallest."""
    return min(candidates, key=lambda allocation: (exact_cost(found, allocation), allocation))


@settings(deadline=None)
@given(found=curves(), data=st.data())
def test_exact_equals_brute_force_and_never_loses_to_greedy(found: Curves, data: Any) -> None:
    candidates = list(itertools.product(*(sorted(curve) for curve in found)))
    budget = data.draw(st.sampled_from(sorted({sum(c) for c in candidates})))
    exact = allocate(found, budget)
    greedy = allocate(found, budget, planner="greedy")
    best = brute_force(found, [c for c in candidates if sum(c) == budget])
    assert sum(exact) == sum(greedy) == budget
    assert objective(found, exact) <= objective(found, greedy)
    close = objective(found, greedy) - objective(found, best) <= 1e-12
    assert exact == (greedy if close else best)


@settings(deadline=None)
@given(found=curves(), data=st.data())
def test_flops_equal_brute_force(found: Curves, data: Any) -> None:
    small = st.integers(1, 5)
    large = st.integers(1, 10**15)
    costs = [data.draw(st.one_of(small, large)) for _ in found]
    candidates = list(itertools.product(*(sorted(curve) for curve in found)))

    def flops(allocation: tuple[int, ...]) -> int:
        return sum(k * cost for k, cost in zip(allocation, costs, strict=True))

    least, most = flops(candidates[0]), flops(candidates[-1])
    budget = data.draw(st.integers(least, most + 1))
    within = [c for c in candidates if flops(c) <= budget]
    assert allocate(found, budget, costs=costs) == brute_force(found, within)


def test_an_early_type_does_not_spend_what_later_types_must_have() -> None:
    gentle, steep = {1: 0.3, 2: 0.2, 3: 0.1}, {1: 1.0, 2: 0.1, 3: 0.0}
    assert allocate([gentle, steep], 21, costs=[1, 10]) == (1, 2)
    assert allocate([gentle, steep], 20, costs=[1, 10]) == (3, 1)


def test_ties_go_to_the_lexicographically_smallest_under_flops() -> None:
    flat = {1: 0.5, 2: 0.5, 3: 0.5}
    assert allocate([flat, flat, flat], 100, costs=[7, 1, 3]) == (1, 1, 1)
    # Equal errors at (1, 2) and (2, 1): the smaller comes first although it costs more.
    falling = {1: 0.5, 2: 0.25}
    assert allocate([falling, falling], 8, costs=[2, 3]) == (1, 2)


def test_greedy_breaks_ties_to_the_earlier_type() -> None:
    same = [{3: 0.8, 4: 0.4, 5: 0.2, 6: 0.1, 7: 0.05}] * 3
    assert allocate(same, 16, planner="greedy") == (6, 5, 5)
    assert allocate(same, 14, planner="greedy") == (4, 5, 5)
    # The mirror image is as good, so the exact planner keeps greedy's answer.
    assert allocate(same, 16) == (6, 5, 5)


def test_greedy_transfers_the_pair_of_greatest_gain() -> None:
    easy = {4: 0.1, 5: 0.1, 6: 0.1}
    hard = {4: 0.9, 5: 0.5, 6: 0.0}
    assert allocate([easy, hard, easy], 15, planner="greedy") == (4, 6, 5)


def test_greedy_does_not_cycle_on_float_noise() -> None:
    noisy = [{4: 0.3 + 1e-16, 5: 0.2, 6: 0.1 - 1e-13}, {4: 0.1 * 3, 5: 0.1 * 2, 6: 0.1}]
    assert allocate(noisy, 10, planner="greedy") == (5, 5)


@pytest.mark.parametrize(
    ("ratio", "expected"), [(0.7, 25), (0.8, 28), (0.9, 32), (1.0, 35), (1.1, 39), (1.2, 42)]
)
def test_step_budgets_of_the_paper(ratio: float, expected: int) -> None:
    assert step_budget(ratio, 7, 5) == expected


def test_half_way_budgets_where_floats_and_bankers_rounding_fail() -> None:
    assert round(38.5) == 38
    assert 0.7 * 7 * 5 < 24.5
    assert (step_budget(1.1, 7, 5), step_budget(0.7, 7, 5)) == (39, 25)
    assert round_half_up(Fraction(5, 2)) == 3
    assert round_half_up(Fraction(7, 2)) == 4
    assert step_budget(1, 3, 4) == 12


def test_flop_budget_is_the_exact_floor() -> None:
    assert flop_budget(0.7, [1, 2], 5) == 10
    assert flop_budget(1.1, [6, 4], 3) == 33
    huge = 10**30 + 1
    assert flop_budget(1.0, [huge, huge], 5) == 10 * huge


@pytest.mark.parametrize("ratio", [0.0, -1.0, math.nan, math.inf, "1", None, True])
def test_a_ratio_out_of_range_is_refused(ratio: Any) -> None:
    with pytest.raises(ValueError, match=r"budget_ratio: found .*, expected a finite number > 0"):
        step_budget(ratio, 7, 5)


def test_flops_of_one_step() -> None:
    # X X^T, then its square, then its product with X; a multiply-add is two flops.
    m, n = 3, 5
    assert ns_step_flops(m, n) == 2 * (m * m * n + m * m * m + m * m * n)
    assert ns_step_flops(n, m) == ns_step_flops(m, n)


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (35, (3, 7)),
        (21, (3, 7)),
        (49, (3, 7)),
        (20, (2, 7)),
        (13, (1, 7)),
        (7, (1, 7)),
        (50, (3, 8)),
    ],
)
def test_the_range_is_relaxed_no_farther_than_needed(
    budget: int, expected: tuple[int, int]
) -> None:
    assert relax_range(budget, 7, 3, 7) == expected


def test_the_range_under_flops_only_relaxes_downward() -> None:
    assert relax_range(36, 2, 3, 7, costs=[4, 8]) == (3, 7)
    assert relax_range(35, 2, 3, 7, costs=[4, 8]) == (2, 7)
    assert relax_range(10**9, 2, 3, 7, costs=[4, 8]) == (3, 7)


def test_an_infeasible_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="budget: found 6 steps, expected at least 7"):
        relax_range(6, 7, 3, 7)
    with pytest.raises(ValueError, match="budget: found 11 flops, expected at least 12"):
        relax_range(11, 2, 3, 7, costs=[4, 8])
    with pytest.raises(ValueError, match="budget: found 701 steps, expected at most 100 for each"):
        relax_range(701, 7, 3, 7)


CURVE = {3: 0.5, 4: 0.25}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"planner": "best"}, "planner: found 'best'"),
        ({"planner": "greedy", "costs": [1]}, "planner: found 'greedy', expected 'exact'"),
        ({"costs": [1, 2]}, r"costs: found \[1, 2\], expected 1 integers > 0"),
        ({"costs": [0]}, r"costs: found \[0\]"),
        ({"curves": []}, "curves: found an empty one"),
        ({"curves": [{}]}, "curves: found an empty one"),
        ({"curves": [CURVE, {3: 0.5, 5: 0.1}]}, r"curves: found steps \[3, 5\], expected 3 to 4"),
        ({"curves": [{0: 0.5, 1: 0.2}]}, r"curves: found steps \[0, 1\]"),
        ({"curves": [{3: 0.5, 4: math.nan}]}, "curves: found .*, expected finite errors"),
        ({"budget": 2}, "budget: found 2, expected 3 to 4 steps"),
        ({"budget": 5}, "budget: found 5, expected 3 to 4 steps"),
        ({"budget": 5, "costs": [2]}, "budget: found 5, expected at least 6 flops"),
    ],
)
def test_malformed_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    call = {"curves": [CURVE], "budget": 3, **arguments}
    with pytest.raises(ValueError, match=message):
        allocate(call.pop("curves"), call.pop("budget"), **call)


def test_many_types() -> None:
    """Nothing depends on there being seven."""
    many = [{k: 2.0 ** -(k + i % 3) for k in range(3, 8)} for i in range(60)]
    assert sum(allocate(many, 300)) == 300
    costs = [1 + i % 4 for i in range(60)]
    spent = allocate(many, 5 * sum(costs), costs=costs)
    assert sum(k * c for k, c in zip(spent, costs, strict=True)) <= 5 * sum(costs)
