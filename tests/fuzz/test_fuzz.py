"""The short form; ``python -m tests.fuzz`` is the long one."""

from __future__ import annotations

import pytest

from tests.distributed.harness import Ranks
from tests.faults.series import run_series
from tests.fuzz.cases import cases


@pytest.mark.parametrize("number", [8, pytest.param(60, marks=pytest.mark.slow)])
def test_ranks_one_process_and_the_twin_end_alike(run_on: Ranks, number: int) -> None:
    with cases(run_on) as case:
        assert run_series(case, range(number), seed=7)["with twin"] > number // 4
