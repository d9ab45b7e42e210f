"""Budgets and allocations of Newton-Schulz steps."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amo_dist.schedule import allocate

Curves = list[dict[int, float]]

# A coarse grid of errors makes ties common; the other draws exercise full precision.
ERRORS = st.one_of(st.integers(0, 4).map(lambda n: n / 4), st.floats(0, 1, allow_subnormal=False))
# Sums and differences of these round to the same float along different ways.
ROUNDING = st.one_of(
    ERRORS,
    st.sampled_from([0.1, 0.2, 0.3, 0.1 * 3, 0.7, 0.6 + 1e-16, 0.1 + 1e-13, 1e16, 1e16 + 2, -1.0]),
    st.integers(-3, 3).map(lambda n: 1 + n * 2.0**-52),
)


@st.composite
def curves(draw: st.DrawFn, errors: st.SearchStrategy[float] = ERRORS) -> Curves:
    low = draw(st.integers(1, 4))
    ks = range(low, low + draw(st.integers(1, 4)))
    return [{k: draw(errors) for k in ks} for _ in range(draw(st.integers(1, 5)))]


def plain_greedy(
    curves: Sequence[Mapping[int, float]], budget: int, base_steps: int
) -> tuple[int, ...]:
    """The passes as the AMO paper has them: the best of all pairs, the first of equal ones.

    Args:
        curves: The error of each operator type by number of steps.
        budget: Steps of all types together.
        base_steps: Where each type begins.
    """
    low, high = min(curves[0]), max(curves[0])
    steps = [min(max(base_steps, low), high)] * len(curves)

    def change(i: int, by: int) -> float:
        return curves[i][steps[i] + by] - curves[i][steps[i]]

    def movable(by: int) -> list[int]:
        return [i for i, k in enumerate(steps) if low <= k + by <= high]

    while sum(steps) != budget:
        by = 1 if sum(steps) < budget else -1
        steps[min((change(i, by), i) for i in movable(by))[1]] += by
    while True:
        pairs = [(change(i, 1) + change(j, -1), i, j) for i in movable(1) for j in movable(-1)]
        best, i, j = min((pair for pair in pairs if pair[1] != pair[2]), default=(0.0, 0, 0))
        if not best < -1e-12:
            return tuple(steps)
        steps[i] += 1
        steps[j] -= 1


@settings(max_examples=100)
@given(found=curves(), data=st.data())
def test_the_least_error_is_that_of_all_allocations(found: Curves, data: Any) -> None:
    small, large = st.integers(1, 5), st.integers(1, 10**15)
    costs = [data.draw(st.one_of(small, large)) for _ in found]
    choices = list(itertools.product(*(sorted(curve) for curve in found)))

    def flops(choice: tuple[int, ...]) -> int:
        return sum(map(operator.mul, choice, costs))

    budget = data.draw(st.integers(flops(choices[0]), flops(choices[-1]) + 1))

    def cost(choice: tuple[int, ...]) -> Fraction:
        return sum((Fraction(c[k]) for c, k in zip(found, choice, strict=True)), Fraction(0))

    within = [choice for choice in choices if flops(choice) <= budget]
    best = min(within, key=lambda one: (cost(one), one))
    assert allocate.least_error(found, budget, costs) == best


@settings(max_examples=100)
@given(kinds=curves(ROUNDING), data=st.data())
def test_greedy_takes_the_first_of_the_best_pairs(kinds: Curves, data: Any) -> None:
    found = data.draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=9))
    low, high = min(found[0]), max(found[0])
    budget = data.draw(st.integers(low * len(found), high * len(found)))
    base = data.draw(st.integers(1, 8))
    assert allocate.greedy(found, budget, base) == plain_greedy(found, budget, base)


@pytest.mark.parametrize(
    ("ratio", "expected"), [(0.7, 25), (0.8, 28), (0.9, 32), (1.0, 35), (1.1, 39), (1.2, 42)]
)
def test_step_budgets_are_rounded_half_up_exactly(ratio: float, expected: int) -> None:
    """The paper's list, where floats and banker's rounding give 24 and 38."""
    assert allocate.step_budget(ratio, 7, 5) == expected
    assert allocate.round_half_up(Fraction(5, 2)) == 3


def test_flops() -> None:
    # X X^T, then its square, then its product with X; a multiply-add is two flops.
    m, n = 3, 5
    assert allocate.ns_step_flops(m, n) == 2 * (m * m * n + m * m * m + m * m * n)
    assert allocate.ns_step_flops(n, m) == allocate.ns_step_flops(m, n)
    assert allocate.flop_budget(1.1, [6, 4], 3) == 33
    huge = 10**30 + 1
    assert allocate.flop_budget(1.0, [huge, huge], 5) == 10 * huge
