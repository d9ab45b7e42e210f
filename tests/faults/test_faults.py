"""The short form of the campaign; ``python -m tests.faults`` is the long one."""

from __future__ import annotations

import pytest

from tests.faults.campaign import trials
from tests.faults.series import run_series


@pytest.mark.parametrize("numbers", [range(1), pytest.param(range(1, 6), marks=pytest.mark.slow)])
def test_a_run_killed_and_damaged_ends_on_the_same_bits(numbers: range) -> None:
    with trials() as trial:
        events = run_series(trial, numbers, seed=1)
    assert events["resumes"] > 0
