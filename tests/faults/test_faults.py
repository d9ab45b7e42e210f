"""The short form of the campaign; ``python -m tests.faults`` is the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.harness import Ranks
from tests.faults.campaign import Campaign
from tests.faults.series import run_series


@pytest.mark.parametrize("numbers", [range(1), pytest.param(range(1, 6), marks=pytest.mark.slow)])
def test_a_run_killed_and_damaged_ends_alike(run_on: Ranks, tmp_path: Path, numbers: range) -> None:
    events = run_series(Campaign(run_on, tmp_path).trial, numbers, seed=1)
    assert events["resumes"] > 0
