"""The quickstart on a tiny model: to the lock, killed, resumed, and stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.titan_ranks import Run, assert_same_end

ROOT = Path(__file__).resolve().parents[2]
NUM_STEPS = 12
OPTIONS = [
    *("--model.flavor", "tiny", "--training.steps", str(NUM_STEPS)),
    *("--training.seq_len", "64", "--training.local_batch_size", "2"),
    *("--training.global_batch_size", "4"),
    *("--optimizer.amo.observe_every", "2", "--optimizer.amo.observe_until", "4"),
    *("--optimizer.amo.transition_steps", "4", "--lr_scheduler.warmup_steps", "3"),
    *("--metrics.log_freq", "1", "--metrics.no-enable_tensorboard"),
    *("--checkpoint.interval", "1", "--checkpoint.keep_latest_k", "0"),
]
# One thread: the bits of a reduction may depend on the number of threads.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "AMO_DEVICE": "cpu", "PYTHONPATH": str(ROOT)}

pytestmark = pytest.mark.slow


def command(folder: Path, *options: str) -> list[str]:
    config = str(ROOT / "configs" / "quickstart.toml")
    start = [sys.executable, "-m", "torchtitan_ext", "train", config, "--ranks", "2"]
    return [*start, "--dump_folder", str(folder), *OPTIONS, *options]


def train(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(folder, *options), env=ENVIRONMENT, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never stopped, with a checkpoint of each step."""
    folder = tmp_path_factory.mktemp("runs") / "reference"
    done = train(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_run_goes_through_all_phases_and_learns(reference: Path) -> None:
    records = Run(reference, 2).records()
    phases = [record["phase"] for record in records]
    assert phases == ["observation"] * 4 + ["transition"] * 3 + ["locked"] * 5
    assert records[-1]["loss"] < records[0]["loss"] - 0.5  # from ln(320), which says nothing
    assert sum(records[0]["num_steps_by_type"].values()) == 35
    assert {"amo/ell/attn_q", "optimizer/observe_seconds"} <= records[-1]["optimizer"].keys()


def test_a_killed_run_goes_on_as_if_nothing_had_happened(reference: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start_until_step(5, folder)  # in the transition
    os.kill(first_rank(folder), signal.SIGKILL)
    assert process.wait() == 1
    assert train(folder).returncode == 0
    assert_same_end(Run(folder, 2), Run(reference, 2), NUM_STEPS)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_the_command(tmp_path: Path, number: signal.Signals) -> None:
    process = start_until_step(2, tmp_path / "run", "--training.steps", "4000")
    rank = first_rank(tmp_path / "run")
    if number == signal.SIGINT:
        words = ("--training.steps", "4000", "--checkpoint.stop_seconds", "2")
        refused = train(tmp_path / "run", *words)
        assert refused.returncode == 2
        assert "is being written by process" in refused.stderr
    process.send_signal(number)
    process.wait(timeout=120)
    for _ in range(600):  # what is left saves its checkpoint and ends, within half a minute
        if not Path(f"/proc/{rank}").exists():
            break
        time.sleep(0.05)
    assert not Path(f"/proc/{rank}").exists()


def first_rank(folder: Path) -> int:
    return int((folder / "lock.holder").read_text().split()[1])


def start_until_step(step: int, folder: Path, *options: str) -> subprocess.Popen[bytes]:
    """Start a run and wait for a checkpoint."""
    process = subprocess.Popen(
        command(folder, *options),
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        # Shells start what runs in their background with SIGINT ignored, and children inherit it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 400  # A start takes some seconds, on a busy machine minutes.
    while not (folder / "checkpoint" / f"step-{step}" / ".metadata").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process
