"""Stops and kills of whole runs: whether they are saved, what is said, and what is left."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.integration.processes import TRAIN, Command
from tests.integration.titan_ranks import CONFIG, Run
from torchtitan_ext.runs.run_files import complete_steps

pytestmark = pytest.mark.slow


def start(folder: Path, *options: str) -> tuple[Command, Run]:
    run = Run(folder / "run", 2)
    words = [*TRAIN, CONFIG, f"--dump_folder={run.folder}", "--training.steps=4000"]
    return Command([*words, "--metrics.log_freq=1", *options], folder), run


@pytest.mark.parametrize(("ranks", "number"), [(2, signal.SIGTERM), (1, signal.SIGINT)])
def test_a_stop_before_the_first_step_ends_at_once_and_says_go_on(
    tmp_path: Path, ranks: int, number: signal.Signals
) -> None:
    command, run = start(tmp_path, f"--ranks={ranks}", "--checkpoint.enable")
    command.wait_until((run.folder / "lock").exists)  # written while the trainer is built
    output = command.stop(number, 75)
    assert complete_steps(run.folder / "checkpoint") == []
    assert "Stopped; the same command goes on." in output


def test_a_stop_without_checkpoints_is_no_invitation_to_go_on(tmp_path: Path) -> None:
    command, run = start(tmp_path, "--ranks=1")
    command.wait_until((run.folder / "metrics.jsonl").exists)
    time.sleep(2)
    output = command.stop(signal.SIGTERM, 143)
    assert "which is not saved: checkpoints are off" in output


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


def test_a_stop_of_a_rank_of_plain_torchrun_is_saved_and_no_success(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", 2)
    words = ["torchrun", "--nproc-per-node=2", "-m", "torchtitan_ext.train"]
    words += [f"--job.config_file={CONFIG}", f"--dump_folder={run.folder}"]
    words += ["--training.steps=4000", "--checkpoint.enable", "--metrics.log_freq=1"]
    command = Command(words, tmp_path)
    command.wait_until(run.losses)
    os.kill(run.first_rank(), signal.SIGTERM)
    command.end(1)
    assert complete_steps(run.folder / "checkpoint")
