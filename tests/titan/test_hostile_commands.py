"""A sample of the hostile command lines of ``python -m tests.hostile``, and single mends."""

from __future__ import annotations

import os
import random
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests import hostile
from torchtitan_ext.cli import main
from torchtitan_ext.tools.command import one_line

SAMPLE = 150
QUICK = ("plan", "export", "doctor", "paper compare", "paper static-schedule")
"""Commands that answer in milliseconds."""


@pytest.mark.slow
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
    assert len(found) > 9_000
    told = [f"{hostile.shown(one.line)}\n    {one.problem()}" for one in bad]
    assert not told, "\n".join(told)


KINDS = {
    "a loop of links": ["report", "loop"],
    "a path below a file": ["paper", "static-schedule", "empty/x"],
    "a folder for a file": ["paper", "static-schedule", "log.jsonl", "-o", "folder"],
    "a full disk": ["paper", "static-schedule", "log.jsonl", "-o", "/dev/full"],
    "deep JSON": ["paper", "compare", "deep.json"],
    "deep TOML": ["export", "run", "-o", "new", "--config", "deep.toml"],
    "a file without end": ["paper", "compare", "/dev/zero"],
    "a plan without end": ["plan", "--plan", "/dev/zero"],
    "a linked plan without end": ["plan", "--plan", "run_of_zeros"],
    "a log without end": ["paper", "static-schedule", "/dev/zero"],
    "a config without end": ["train", "/dev/zero"],
    "a config to look at without end": ["preflight", "/dev/zero"],
    "a config to export by without end": ["export", "run", "-o", "new", "--config", "/dev/zero"],
    "a pipe for a plan": ["plan", "--plan", "pipe"],
    "a pipe for metrics": ["report", "run_of_pipes"],
    "a pipe for a config": ["preflight", "pipe"],
    "a pipe for figures": ["doctor", "--json", "pipe"],
    "a config of other types": ["export", "run_sparse", "-o", "new"],
    "a record without a step": ["report", "run_null"],
    "a world of very many": ["preflight", hostile.QUICKSTART, "--world", "1000000"],
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


def test_a_closed_output_is_told() -> None:
    words = [sys.executable, "-m", "torchtitan_ext", "plan", "--ell", "a=.1"]
    environment = {**os.environ, "PYTHONPATH": str(hostile.ROOT)}
    found = subprocess.run(
        ["bash", "-c", f"{shlex.join(words)} >&-"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert found.returncode == 2
    assert found.stderr == "error: standard output: found it closed, expected it open\n"


@pytest.mark.parametrize("words", [["preflight", hostile.QUICKSTART], ["report", "."]])
def test_a_deleted_folder_is_told(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gone").mkdir()
    os.chdir("gone")
    (tmp_path / "gone").rmdir()
    assert main(words) == 2
    told = capsys.readouterr().err
    assert told == "error: the current folder has been deleted, expected one that exists\n"
