"""Stops and kills of whole runs: whether they are saved, what is said, and what is left.

Two launchers on loopback stand for two nodes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
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


# ------------------------------------------------------------------ several nodes

STEPS = 40
INTERVAL = 10  # AMO locks at step 14: a run resumed from step 10 is in its transition
OPTIONS = (
    f"--training.steps={STEPS}",
    "--checkpoint.enable",
    f"--checkpoint.interval={INTERVAL}",
    "--checkpoint.no-last-save-model-only",
    "--restarts=1",
)


@contextlib.contextmanager
def nodes(run: Run) -> Iterator[list[Command]]:
    """Two launchers of one rank each, as on two nodes; a failure ends them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        head = f"127.0.0.1:{listener.getsockname()[1]}"  # a port that is free
    where = ("--nodes", "2", "--head", head, "--ranks", "1")
    words = [*TRAIN, CONFIG, *where, f"--dump_folder={run.folder}", *OPTIONS]
    logs = [run.folder.with_name(f"{run.folder.name}-node{index}") for index in range(2)]
    for folder in logs:
        folder.mkdir(exist_ok=True)
    started = [Command(words, folder) for folder in logs]
    try:
        yield started
    finally:
        for node in started:
            node.process.kill()
            node.process.wait(timeout=30)


def test_a_run_of_two_nodes_outlives_a_dead_rank_and_a_stop(tmp_path: Path) -> None:
    """It ends as if nothing had happened, bit for bit: the same kernels, ranks, order of sums."""
    whole, broken = Run(tmp_path / "whole", 2), Run(tmp_path / "broken", 2)
    with nodes(whole) as started:
        for node in started:
            node.end()
        # Each of the two ranks has a log of its own, though both are "rank 0 of a node".
        assert len([*(whole.folder / "logs").rglob("attempt_0/0/stderr.log")]) == 2
    with nodes(broken) as started:
        started[0].wait_until(lambda: INTERVAL in broken.complete())
        os.kill(broken.first_rank(), signal.SIGKILL)
        started[0].wait_until(lambda: 2 * INTERVAL in broken.complete())
        for node in started:
            node.process.send_signal(signal.SIGTERM)
        output = "".join(node.end(75) for node in started)
        last = max(broken.losses())
        assert f"training resumes at step {INTERVAL + 1} of" in output
        assert f"stopped at step {last}, which is saved" in output
    assert 2 * INTERVAL <= last < STEPS
    with nodes(broken) as started:
        for node in started:
            node.end()
    assert sorted(whole.losses()) == list(range(1, STEPS + 1))
    assert broken.losses() == whole.losses()
