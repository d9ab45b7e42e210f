"""Several nodes: two launchers on loopback stand for two."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.integration.titan_ranks import Run

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "debug_llama3.toml"
STEPS = 40
INTERVAL = 10  # AMO locks at step 14: a run resumed from step 10 is in its transition

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it reads /proc")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def environment(**changes: str) -> dict[str, str]:
    # An installed environment, this very one, as a user would have activated it.
    bin_folder = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    kept = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
    ours = {"VIRTUAL_ENV": sys.prefix, "PATH": bin_folder, "PYTHONPATH": str(ROOT)}
    return {**kept, **ours, "OMP_NUM_THREADS": "1", **changes}


class Nodes:
    """Two launchers of one rank each, as on two nodes."""

    def __init__(self, folder: Path, options: Sequence[str]) -> None:
        self._logs = folder.with_name(folder.name + "-logs")
        self._logs.mkdir(exist_ok=True)
        where = ("--nodes", "2", "--head", f"127.0.0.1:{free_port()}", "--ranks", "1")
        command = [sys.executable, "-m", "torchtitan_ext", "train", str(CONFIG), *where]
        self._command = [*command, f"--dump_folder={folder}", *options]
        self.agents = [self._start(index) for index in range(2)]

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        with (self._logs / f"node{index}.txt").open("wb") as output:
            # A session of its own, so that a node can be killed whole, its ranks included.
            return subprocess.Popen(
                self._command,
                env=environment(AMO_DEVICE="cpu"),
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def finish(self, status: int = 0) -> None:
        for agent in self.agents:
            assert agent.wait(timeout=240) == status, self.output()

    def kill(self) -> None:
        """End both nodes at once, as a power cut would."""
        for agent in self.agents:
            descendants = processes_below(agent.pid)
            for pid in [agent.pid, *descendants]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            agent.wait(timeout=30)

    def output(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in self._logs.glob("node*.txt"))


def processes_below(pid: int) -> list[int]:
    """Every process below ``pid``: torchrun gives its ranks sessions of their own."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    try:
        found = [int(child) for child in children.read_text().split()]
    except OSError:
        return []
    return found + [below for child in found for below in processes_below(child)]


@contextlib.contextmanager
def nodes(folder: Path, *options: str) -> Iterator[Nodes]:
    started = Nodes(folder, options)
    try:
        yield started
    finally:
        started.kill()


def losses(folder: Path) -> dict[int, float]:
    return Run(folder, 2).losses()


def wait_for(path: Path, run: Nodes) -> None:
    deadline = time.monotonic() + 240
    while not path.exists():
        assert all(agent.poll() is None for agent in run.agents), run.output()
        assert time.monotonic() < deadline, run.output()
        time.sleep(0.02)


@pytest.mark.slow
def test_a_run_of_two_nodes_outlives_a_dead_rank_and_a_stop(tmp_path: Path) -> None:
    """It ends as if nothing had happened, bit for bit: the same kernels, ranks, order of sums."""
    options = (
        f"--training.steps={STEPS}",
        "--checkpoint.enable",
        f"--checkpoint.interval={INTERVAL}",
        "--checkpoint.no-last-save-model-only",
        "--restarts=1",
    )
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    with nodes(whole, *options) as run:
        run.finish()
        # Each of the two ranks has a log of its own, though both are "rank 0 of a node".
        assert len([*(whole / "logs").rglob("attempt_0/0/stderr.log")]) == 2
    with nodes(broken, *options) as run:
        # The metadata is written last.
        wait_for(broken / f"checkpoint/step-{INTERVAL}/.metadata", run)
        os.kill(int((broken / "lock.holder").read_text().split()[1]), signal.SIGKILL)
        wait_for(broken / f"checkpoint/step-{2 * INTERVAL}/.metadata", run)
        for agent in run.agents:
            agent.send_signal(signal.SIGTERM)
        run.finish(75)
        assert f"training resumes at step {INTERVAL + 1} of" in run.output()
        assert f"stopped at step {max(losses(broken))}, which is saved" in run.output()
    assert 2 * INTERVAL <= max(losses(broken)) < STEPS
    with nodes(broken, *options) as run:
        run.finish()
    assert sorted(losses(whole)) == list(range(1, STEPS + 1))
    assert losses(broken) == losses(whole)
