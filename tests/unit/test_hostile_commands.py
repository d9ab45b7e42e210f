"""A sample of the hostile command lines of ``python -m tests.hostile``, and single mends."""

from __future__ import annotations

import io
import random
import sys
import warnings
from pathlib import Path

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own modules warn while torchtitan imports them
    import torchtitan_ext.plugin.trainer  # noqa: F401

from amo_dist.tools.command import one_line
from tests import hostile
from torchtitan_ext.cli import main

SAMPLE = 150
QUICK = ("plan", "simulate", "watch", "export", "doctor", "paper compare", "paper static-schedule")
"""Commands that answer in milliseconds."""


def test_hostile_command_lines_end_in_one_line() -> None:
    dice = random.Random(0)
    with hostile.in_corner() as values:
        found = [*hostile.lines(values, dice.sample(hostile.config_fields(), 4))]
        quick = [line for line in found if " ".join(line).startswith(QUICK)]
        rest = [line for line in found if line not in set(quick)]
        # Pictures and models take seconds.
        rest = [line for line in rest if line[:2] != ("report", "run") and line[:1] != ("train",)]
        chosen = dice.sample(quick, SAMPLE) + dice.sample(rest, SAMPLE // 5)
        bad = hostile.try_lines(chosen)
    assert len(found) > 10_000
    told = [f"{hostile.shown(one.line)}\n    {one.problem()}" for one in bad]
    assert not told, "\n".join(told)


KINDS = {
    "a path that is too long": ["watch", "x" * 300],
    "a loop of links": ["report", "loop"],
    "a path below a file": ["paper", "static-schedule", "empty/x"],
    "a folder for a file": ["paper", "static-schedule", "log.jsonl", "-o", "folder"],
    "a full disk": ["paper", "static-schedule", "log.jsonl", "-o", "/dev/full"],
    "deep JSON": ["paper", "compare", "deep.json"],
    "deep TOML": ["export", "run", "-o", "new", "--config", "deep.toml"],
    "a file without end": ["paper", "compare", "/dev/zero"],
    "deep JSON of shapes": ["simulate", "--shapes", "deep.json"],
    "fields of other types": ["watch", "run_types"],
    "a config of other types": ["export", "run_sparse", "-o", "new"],
    "a record without a step": ["report", "run_null"],
    "an integer of twenty digits": ["simulate", "--model=qwen3-1.7b", f"--ranks={'9' * 20}"],
    "very many ranks": ["simulate", "--model=qwen3-1.7b", "--ranks", "1000000"],
    "a world of very many": ["preflight", hostile.QUICKSTART, "--world", "1000000"],
    "very many layers": ["simulate", "--shapes", "shape.json"],
    "an endless wait": ["watch", "run", "--follow", "--interval", "inf"],
    "an option's end for a value": ["watch", "run", "--interval=--"],
    "two lines": ["watch", "a\nb"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_one_line_and_status_2(kind: str) -> None:
    with hostile.in_corner():
        (found,) = [hostile.answer(KINDS[kind])]
    assert (found.status, found.traceback) == (2, "")
    assert found.problem() == ""
    assert found.error.count("\n") == 1
    assert "error: " in found.error


def test_a_wrong_value_of_the_config_names_the_command() -> None:
    with hostile.in_corner(), hostile.stopped():
        found = hostile.answer(["train", hostile.QUICKSTART, "--training.steps=abc"])
    assert found.status == 2
    assert "amo train --help" in found.error


def test_a_message_is_one_line_of_bounded_length() -> None:
    assert one_line("a\nb\x1b[2J\udcff") == "a\\nb\\x1b[2J\\udcff"
    assert len(one_line("x" * 100_000)) < 1100


def test_a_name_that_is_no_utf_8_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "\udcff"
    folder.mkdir()
    output = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    monkeypatch.setattr(sys, "stdout", output)
    assert main(["watch", str(folder)]) == 0
    assert b"\\udcff: no step is logged yet" in output.buffer.getvalue()  # type: ignore[attr-defined]
