"""Stops and kills of whole runs: whether they are saved, what is said, and what is left."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.integration.processes import TRAIN, Command
from tests.integration.titan_ranks import CONFIG, Run

pytestmark = pytest.mark.slow


def start(folder: Path, *options: str) -> tuple[Command, Run]:
    run = Run(folder / "run", 2)
    words = [*TRAIN, CONFIG, f"--dump_folder={run.folder}", "--training.steps=4000"]
    return Command([*words, "--metrics.log_freq=1", *options], folder), run


@pytest.mark.parametrize(
    ("options", "file", "status", "text"),
    [
        # The lock is written while the trainer is built.
        (("--ranks=2", "--checkpoint.enable"), "lock", 75, "Stopped; the same command goes on."),
        (("--ranks=1",), "metrics.jsonl", 143, "which is not saved: checkpoints are off"),
    ],
)
def test_a_stop_that_saves_nothing(
    tmp_path: Path, options: tuple[str, ...], file: str, status: int, text: str
) -> None:
    command, run = start(tmp_path, *options)
    command.wait_until((run.folder / file).exists)
    time.sleep(2 if status == 143 else 0)
    assert text in command.stop(signal.SIGTERM, status)
    assert run.complete() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_the_command(tmp_path: Path, number: signal.Signals) -> None:
    options = ("--ranks=2", "--checkpoint.enable", "--checkpoint.interval=2")
    command, run = start(tmp_path, *options)
    command.wait_until(run.complete)
    rank = run.first_rank()
    if number == signal.SIGINT:
        second, _ = start(tmp_path, *options, "--checkpoint.stop_seconds=2")
        assert "is being written by process" in second.end(2)
    command.process.send_signal(number)
    command.process.wait(timeout=120)
    for _ in range(600):  # what is left saves its checkpoint and ends, within half a minute
        if not Path(f"/proc/{rank}").exists():
            break
        time.sleep(0.05)
    assert not Path(f"/proc/{rank}").exists()
