"""A node of several: what it is started with, which failures it starts again, how it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.examples import ROOT
from torchtitan_ext.plugin import machine, patches
from torchtitan_ext.tools import nodes


def with_device(patch: pytest.MonkeyPatch, kind: str | None, count: int = 0) -> None:
    patch.delenv("AMO_DEVICE", raising=False)
    patch.setattr("torch._utils._get_available_device_type", lambda: kind)
    module = type("Module", (), {"device_count": staticmethod(lambda: count)})
    patch.setattr("torch.get_device_module", lambda kind: module)


VARIABLES = {"NODES": "2", "HEAD": "node0:29500"}


def test_a_node_without_accelerator_is_an_error_unless_it_is_meant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_device(monkeypatch, None)
    with pytest.raises(ValueError, match=r"found no accelerator on \S+, expected one .*AMO_DEVICE"):
        nodes.Node.of(VARIABLES)
    monkeypatch.setenv("AMO_DEVICE", "cpu")
    assert nodes.Node.of({**VARIABLES, "GPUS": "3"}).ranks == 3
    assert nodes.Node.of(VARIABLES).device == "cpu"


def test_a_node_that_lost_an_accelerator_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with_device(monkeypatch, "cuda", 7)
    assert nodes.Node.of(VARIABLES).ranks == 7
    with pytest.raises(ValueError, match=r"GPUS: found 8, expected at most 7, "):
        nodes.Node.of({**VARIABLES, "GPUS": "8"})


def test_a_rank_whose_device_is_gone_does_not_train_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with_device(monkeypatch, None)
    assert machine.device_type() == "cpu"
    monkeypatch.setenv("AMO_DEVICE", "cuda")
    with pytest.raises(ValueError, match=r"AMO_DEVICE: found no accelerator on .* expected 'cuda'"):
        patches.install()
    with_device(monkeypatch, "cuda", 1)
    monkeypatch.setenv("AMO_DEVICE", "cuda")
    assert machine.device_type() == "cuda"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"HEAD": "node0"}, r"HEAD: found 'node0', expected host:port"),
        ({"NODES": "four"}, r"NODES: found 'four', expected an integer >= 1"),
        ({"GPUS": "0"}, r"GPUS: found '0', expected an integer >= 1"),
        ({"MAX_RESTARTS": "-1"}, r"MAX_RESTARTS: found '-1', expected an integer >= 0"),
    ],
)
def test_a_variable_that_is_not_as_expected_is_named(
    change: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMO_DEVICE", "cpu")
    with pytest.raises(ValueError, match=expected):
        nodes.Node.of({**VARIABLES, **change})


# ------------------------------------------------------------------ two nodes

NODE = """
import pathlib, sys
from torchtitan_ext.tools import nodes

folder, head, restarts, grace, program = sys.argv[1:]
node = nodes.Node(2, head, 1, "cpu", "run", int(restarts), pathlib.Path(folder) / "logs")
progress = lambda: len(list(pathlib.Path(folder).glob("saved*")))
sys.exit(nodes.start(node, ["-c", program, folder], progress, int(grace)))
"""

RANK = """
import os, pathlib, signal, sys, time
rank, folder = os.environ["RANK"], pathlib.Path(sys.argv[1])
number = len(list(folder.glob(f"start*-{rank}")))
(folder / f"start{number}-{rank}").touch()
"""


class Nodes:
    """Two launchers, each of one rank that runs ``program``."""

    def __init__(self, folder: Path, program: str, restarts: int = 3, grace: int = 60) -> None:
        self.folder = folder
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            head = f"127.0.0.1:{listener.getsockname()[1]}"
        arguments = [str(folder), head, str(restarts), str(grace), RANK + program]
        variables = {"PYTHONPATH": str(ROOT), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-c", NODE, *arguments],
                env={**os.environ, **variables},
                stderr=subprocess.PIPE,
                text=True,
            )
            for _ in range(2)
        ]

    def wait_for(self, names: list[str]) -> None:
        while not all((self.folder / name).exists() for name in names):
            assert all(one.poll() is None for one in self._processes), self.ends()
            time.sleep(0.05)

    def stop(self) -> None:
        for one in self._processes:
            one.send_signal(signal.SIGTERM)

    def ends(self) -> list[tuple[int, str]]:
        """Exit status and last line of each."""
        errors = [one.communicate(timeout=300)[1] for one in self._processes]
        lasts = [text.strip().splitlines()[-1] for text in errors]
        return [(one.returncode, last) for one, last in zip(self._processes, lasts, strict=True)]

    def starts(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("start*"))


def test_a_mistake_ends_all_nodes_at_the_first_start(tmp_path: Path) -> None:
    run = Nodes(tmp_path, "sys.exit(2) if rank == '1' else time.sleep(600)")
    for status, last in run.ends():
        assert status == 2
        assert last.startswith("error (rank 1): ended with status 2")
    assert run.starts() == ["start0-0", "start0-1"]
    logs = sorted(path.relative_to(tmp_path / "logs") for path in tmp_path.rglob("stderr.log"))
    host = socket.gethostname().partition(".")[0]
    assert [str(path) for path in logs] == [f"{host}-rank{r}/0/stderr.log" for r in range(2)]


def test_a_dead_rank_is_started_again_and_after_progress_as_often_as_before(tmp_path: Path) -> None:
    program = """
number == 1 and (folder / "saved").touch()
os.kill(os.getpid(), signal.SIGKILL) if rank == "0" else time.sleep(600)
"""
    run = Nodes(tmp_path, program, restarts=1)
    for status, last in run.ends():
        assert status == 1
        assert last.startswith("error (rank 0): ended by SIGKILL; its memory may have run out")
    # The first may be followed by one, and so may the second, which has saved.
    assert {name for name in run.starts() if name.endswith("-0")} == {
        f"start{i}-0" for i in range(3)
    }


@pytest.mark.parametrize(("grace", "status"), [(60, 0), (1, 128 + signal.SIGTERM)])
def test_a_stop_waits_as_long_as_ranks_may_save(tmp_path: Path, grace: int, status: int) -> None:
    program = """
def save(*_):
    (folder / f"saving-{rank}").touch()
    time.sleep(3)
    os._exit(0)

signal.signal(signal.SIGTERM, save)
(folder / f"ready-{rank}").touch()
time.sleep(600)
"""
    run = Nodes(tmp_path, program, grace=grace)
    run.wait_for(["ready-0", "ready-1"])
    run.stop()
    ends = run.ends()
    assert [found for found, _ in ends] == [status] * 2
    expected: Any = "stopped by SIGTERM; " if status == 0 else "error: stopped by SIGTERM; ranks ["
    assert all(last.startswith(expected) for _, last in ends)
    assert sorted(path.name for path in tmp_path.glob("saving*")) == ["saving-0", "saving-1"]
