"""The shipped schedule files are the named tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from amo_dist.schedule.coefficients import named_schedule
from torchtitan_ext.config.schedule_file import load_schedule_file

TABLES = Path(__file__).resolve().parents[2] / "configs" / "schedules"


@pytest.mark.parametrize("name", ["a1", "a2", "a3", "a4", "a5"])
def test_shipped_files_are_the_named_tables(name: str) -> None:
    assert load_schedule_file(TABLES / f"{name}.toml") == dict(named_schedule(name).by_type)
