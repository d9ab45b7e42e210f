"""Schedule files: the shipped ones are the named tables, and mistakes are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from amo_dist.schedule.coefficients import named_schedule
from amo_dist.schedule.types import Schedule
from torchtitan_ext.config.schedule_file import load_schedule_file

TABLES = Path(__file__).resolve().parents[2] / "configs" / "schedules"
VALID = """
format = 1
source = "here"
[schedules.attn_q]
steps = 1
norm_scale = 1
preconditioner = "frobenius"
coefficients = [[1, 0.5, 0.25]]
"""


@pytest.mark.parametrize("name", ["a1", "a2", "a3", "a4", "a5"])
def test_shipped_files_are_the_named_tables(name: str) -> None:
    assert load_schedule_file(TABLES / f"{name}.toml") == dict(named_schedule(name).by_type)


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("format = 1", "format = 2", "format"),
        ("[schedules.attn_q]", "[schedule.attn_q]", "schedules"),
        ("steps = 1", "steps = 2", "steps"),
        ("steps = 1", "stepz = 1", "steps"),
        ("steps = 1", "steps = 1\nextra = 1", "extra"),
        ("norm_scale = 1", "norm_scale = nan", "norm_scale"),
        ('"frobenius"', '"spectral"', "preconditioner"),
        ("[[1, 0.5, 0.25]]", "[[1, 0.5]]", "coefficients"),
        ("[[1, 0.5, 0.25]]", '[[1, 0.5, "x"]]', "coefficients"),
        ("steps = 1", "steps = 1\nell = 0.5", "coefficients"),
        ("steps = 1", "steps = 1\nell = 0", "ell"),
        ("format = 1", "format = ", "not TOML"),
    ],
)
def test_malformed_files_are_named(tmp_path: Path, old: str, new: str, field: str) -> None:
    path = tmp_path / "t.toml"
    path.write_text(VALID)
    assert load_schedule_file(path) == {"attn_q": Schedule(((1.0, 0.5, 0.25),), norm_scale=1.0)}
    path.write_text(VALID.replace(old, new))
    with pytest.raises(ValueError, match=rf"(?s)t\.toml.*{field}"):
        load_schedule_file(path)
