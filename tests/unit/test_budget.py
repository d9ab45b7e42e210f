from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amo_dist.schedule.budget import (
    flop_budget,
    greedy,
    ns_step_flops,
    relax_range,
    round_half_up,
    step_budget,
)
from amo_dist.schedule.exact import least_error

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


@st.composite
def knapsacks(draw: st.DrawFn) -> tuple[Curves, list[int]]:
    found = draw(curves())
    small, large = st.integers(1, 5), st.integers(1, 10**15)
    return found, [draw(st.one_of(small, large)) for _ in found]


def flops(allocation: tuple[int, ...], costs: list[int]) -> int:
    return sum(k * cost for k, cost in zip(allocation, costs, strict=True))


@settings(deadline=None, max_examples=100)
@given(case=knapsacks(), data=st.data())
def test_the_least_error_is_that_of_all_allocations(
    case: tuple[Curves, list[int]], data: Any
) -> None:
    found, costs = case
    candidates = list(itertools.product(*(sorted(curve) for curve in found)))
    least, most = flops(candidates[0], costs), flops(candidates[-1], costs)
    budget = data.draw(st.integers(least, most + 1))
    within = [c for c in candidates if flops(c, costs) <= budget]
    assert least_error(found, budget, costs) == brute_force(found, within)


def plain_greedy(found: Curves, budget: int, base_steps: int) -> tuple[int, ...]:
    """The passes as the AMO paper has them: the best of all pairs, the first of equal ones."""
    low, high = min(found[0]), max(found[0])
    steps = [min(max(base_steps, low), high)] * len(found)

    def gain(i: int) -> float:
        return found[i][steps[i]] - found[i][steps[i] + 1]

    def loss(j: int) -> float:
        return found[j][steps[j] - 1] - found[j][steps[j]]

    def takers() -> list[int]:
        return [i for i in range(len(found)) if steps[i] < high]

    def givers() -> list[int]:
        return [j for j in range(len(found)) if steps[j] > low]

    while sum(steps) < budget:
        steps[max(takers(), key=gain)] += 1
    while sum(steps) > budget:
        steps[min(givers(), key=loss)] -= 1
    while True:
        pairs = [(gain(i) - loss(j), i, j) for i in takers() for j in givers() if i != j]
        best = max(pairs, key=lambda pair: pair[0], default=(0.0, 0, 0))
        if not best[0] > 1e-12:
            return tuple(steps)
        steps[best[1]] += 1
        steps[best[2]] -= 1


# Sums and differences of these round to the same float along different ways.
ROUNDING = st.one_of(
    ERRORS,
    st.sampled_from([0.1, 0.2, 0.3, 0.1 * 3, 0.7, 0.6 + 1e-16, 0.1 + 1e-13, 1e16, 1e16 + 2, -1.0]),
    st.integers(-3, 3).map(lambda n: 1 + n * 2.0**-52),
)


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_greedy_takes_the_first_of_the_best_pairs(data: Any) -> None:
    low = data.draw(st.integers(1, 4))
    ks = range(low, low + data.draw(st.integers(1, 4)))
    kinds = data.draw(st.lists(st.lists(ROUNDING, min_size=len(ks), max_size=len(ks)), min_size=1))
    picks = data.draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=9))
    found = [dict(zip(ks, errors, strict=True)) for errors in picks]
    budget = data.draw(st.integers(ks[0] * len(found), ks[-1] * len(found)))
    base = data.draw(st.integers(1, 8))
    expected = plain_greedy(found, budget, base)
    assert greedy(found, budget, base) == expected


def test_ties_go_to_the_lexicographically_smallest_under_flops() -> None:
    flat = {1: 0.5, 2: 0.5, 3: 0.5}
    assert least_error([flat, flat, flat], 100, [7, 1, 3]) == (1, 1, 1)
    # Equal errors at (1, 2) and (2, 1): the smaller comes first although it costs more.
    falling = {1: 0.5, 2: 0.25}
    assert least_error([falling, falling], 8, [2, 3]) == (1, 2)


def test_greedy_breaks_ties_to_the_earlier_type() -> None:
    same = [{3: 0.8, 4: 0.4, 5: 0.2, 6: 0.1, 7: 0.05}] * 3
    assert greedy(same, 16) == (6, 5, 5)
    assert greedy(same, 14) == (4, 5, 5)
    # Of the mirror images the least error is at the lexicographically smallest.
    assert least_error(same, 16, [1, 1, 1]) == (5, 5, 6)


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


def test_an_infeasible_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="budget: found 6, expected at least 7"):
        relax_range(6, 7, 3, 7)
    with pytest.raises(ValueError, match="budget: found 701, expected at most 100 steps of each"):
        relax_range(701, 7, 3, 7)
