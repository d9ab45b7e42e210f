"""The short form; ``python -m tests.fuzz`` is the long one."""

from __future__ import annotations

import pytest

from tests.distributed.harness import Ranks
from tests.faults.series import run_series
from tests.fuzz.cases import check, draw


@pytest.mark.parametrize("number", [8, pytest.param(60, marks=pytest.mark.slow)])
def test_ranks_one_process_and_the_twin_end_alike(run_on: Ranks, number: int) -> None:
    events = run_series(lambda rng: check(draw(rng), run_on), range(number), seed=7)
    assert events["with twin"] > number // 4
