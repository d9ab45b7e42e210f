"""Stops of whole runs: while ranks build the model, after steps, and without checkpoints."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchtitan_ext.runs.run_files import complete_steps

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "configs" / "debug_llama3.toml")


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torchtitan_ext", "train", CONFIG, f"--dump_folder={folder}"]
    return subprocess.Popen(
        [*command, "--training.steps=4000", *options],
        env={**os.environ, "AMO_DEVICE": "cpu", "OMP_NUM_THREADS": "1"},
        cwd=folder.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_for(folder: Path, pattern: str, run: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 240
    while not [*folder.glob(pattern)]:
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def stop(run: subprocess.Popen[str], number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
    run.send_signal(number)
    output, errors = run.communicate(timeout=240)
    return run.returncode, output + errors


@pytest.mark.parametrize(("ranks", "number"), [(2, signal.SIGTERM), (1, signal.SIGINT)])
def test_a_stop_before_the_first_step_ends_at_once_and_says_go_on(
    tmp_path: Path, ranks: int, number: signal.Signals
) -> None:
    folder = tmp_path / "run"
    run = start(folder, f"--ranks={ranks}", "--checkpoint.enable", "--metrics.log_freq=1")
    wait_for(folder, "lock", run)  # The first rank writes it while it builds its trainer.
    status, output = stop(run, number)
    assert status == 75, output
    assert complete_steps(folder / "checkpoint") == []
    assert "Stopped; the same command goes on." in output


def test_a_stop_without_checkpoints_is_no_invitation_to_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = start(folder, "--ranks=1", "--metrics.log_freq=1")
    wait_for(folder, "metrics.jsonl", run)
    time.sleep(2)
    status, output = stop(run)
    assert status == 143, output
    assert "which is not saved: checkpoints are off" in output
