"""Several nodes: two launchers on loopback stand for two."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.processes import TRAIN, Command
from tests.integration.titan_ranks import CONFIG, Run

STEPS = 40
INTERVAL = 10  # AMO locks at step 14: a run resumed from step 10 is in its transition
OPTIONS = (
    f"--training.steps={STEPS}",
    "--checkpoint.enable",
    f"--checkpoint.interval={INTERVAL}",
    "--checkpoint.no-last-save-model-only",
    "--restarts=1",
)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def nodes(run: Run) -> Iterator[list[Command]]:
    """Two launchers of one rank each, as on two nodes; a failure ends them."""
    where = ("--nodes", "2", "--head", f"127.0.0.1:{free_port()}", "--ranks", "1")
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


@pytest.mark.slow
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
