"""Sums of squares in integers: the same bits however a matrix is cut, and none overflows."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amo_dist.kernels.exact_sums import fraction_bits, sum_of_squares


@given(
    st.lists(st.floats(-4.375, 4.375, width=32), min_size=1, max_size=40),
    st.lists(st.integers(0, 40), max_size=4),
)
def test_the_sum_of_squares_is_the_same_however_it_is_cut(
    values: list[float], cuts: list[int]
) -> None:
    whole = torch.tensor(values, dtype=torch.float32)
    bits = fraction_bits(len(values), 0.95)
    edges = [0, *sorted(min(cut, len(values)) for cut in cuts), len(values)]
    parts = [whole[a:b] for a, b in itertools.pairwise(edges)]
    total = sum_of_squares(whole, bits)
    assert total == sum(sum_of_squares(part, bits) for part in parts)
    # Each square is rounded by half a unit of 2^-bits at most.
    exact = sum(Fraction(value) ** 2 for value in whole.double().tolist())
    assert abs(int(total) - exact * 2**bits) <= len(values) / 2


@pytest.mark.parametrize("num_elements", [1, 7, 2**24, 10**10])
@pytest.mark.parametrize("decay", [0.0, 0.95, 0.999])
def test_no_sum_overflows(num_elements: int, decay: float) -> None:
    largest = 1 / (1 - decay)
    total = num_elements * largest * 2.0 ** fraction_bits(num_elements, decay)
    assert 2**59 <= total < 2**62
