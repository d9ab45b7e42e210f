"""Starts of ranks: checks before them, their environment, restarts, stops and exit statuses."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousClosedError

from tests.examples import ROOT
from tests.integration.processes import TRAIN, Command
from torchtitan_ext import cli, environment
from torchtitan_ext.plugin import machine, patches, trainer
from torchtitan_ext.tools import train as command

CONFIG = str(ROOT / "configs" / "debug_llama3.toml")


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """Remove what is set for ranks afterwards."""
    set_for_ranks = ("OMP_", "PYTORCH_", "NCCL_", "TORCH", "AMO_DEVICE", "RANK")
    kept = {name: text for name, text in os.environ.items() if not name.startswith(set_for_ranks)}
    with mock.patch.dict(os.environ, kept, clear=True):
        yield


def with_gpus(patch: pytest.MonkeyPatch, count: int) -> None:
    patch.setattr("torch._utils._get_available_device_type", lambda: "cuda" if count else None)
    patch.setattr("torch.cuda.device_count", lambda: count)


# ------------------------------------------------------------------ before any rank starts


@pytest.mark.parametrize(
    ("gpus", "words", "ranks"),
    [(0, [], 2), (0, ["--ranks=4"], 4), (8, [], 8), (8, ["--ranks=1"], 1)],
)
def test_every_gpu_trains_unless_told_otherwise(
    gpus: int, words: list[str], ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus(monkeypatch, gpus)
    start = mock.Mock(return_value=7)
    monkeypatch.setattr(command, "start", start)
    assert cli.main(["train", CONFIG, f"--dump_folder={tmp_path}", *words]) == 7
    assert f"--nproc-per-node={ranks}" in start.call_args.args[0]
    assert start.call_args.args[3] == ranks


def test_a_rank_whose_device_is_gone_does_not_train_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 0)
    assert machine.device_type() == "cpu"
    monkeypatch.setenv("AMO_DEVICE", "cuda")
    with pytest.raises(ValueError, match="AMO_DEVICE"):
        patches.install()
    with_gpus(monkeypatch, 1)
    assert machine.device_type() == "cuda"


# ------------------------------------------------------------------ one environment


def test_variables_that_the_user_has_set_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.variables(10**6)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:native")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    names = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "OMP_NUM_THREADS"}
    assert environment.variables(1).keys() == names


def test_a_rank_of_any_launcher_gets_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of plain torchrun, and of torchtitan's own entry point."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    expected = environment.variables(2)
    monkeypatch.setattr(patches, "install", mock.Mock(side_effect=InterruptedError))
    with pytest.raises(InterruptedError):
        trainer.Trainer(mock.Mock())
    assert {name: os.environ[name] for name in expected} == expected


# ------------------------------------------------------------------ real processes

NODE = """
import json, sys
from types import SimpleNamespace
from torchtitan_ext.tools import train as command

folder, program, restarts = sys.argv[1:]
checkpoint = SimpleNamespace(stop_seconds=60)
config = SimpleNamespace(dump_folder=folder + "/run", checkpoint=checkpoint)
options = ["--nproc-per-node=2", "--rdzv-endpoint=localhost:0", "--rdzv-id=amo"]
options += ["--local-addr=localhost", "--max-restarts=" + restarts]
sys.exit(command.start(options, [program, folder], config, 2))
"""

RANK = """
import os, pathlib, signal, sys, time
from torchtitan_ext.signals import write_exit_reason
rank, start = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
folder = pathlib.Path(sys.argv[1])
"""


def begin(folder: Path, program: str, restarts: int = 0) -> subprocess.Popen[str]:
    """A launcher of two ranks that run ``program``: torch's leaves files open in its process."""
    (folder / "rank.py").write_text(RANK + program)
    return subprocess.Popen(
        [sys.executable, "-c", NODE, str(folder), str(folder / "rank.py"), str(restarts)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_all_ranks_start_again_after_a_failure_in_the_same_environment(tmp_path: Path) -> None:
    program = """
print("ready", rank, flush=True)
if start == "0" and rank == "0":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600 if start == "0" else 0)
(folder / f"variables-{rank}").write_text("\\n".join(f"{k}={v}" for k, v in os.environ.items()))
(folder / f"ready-{rank}").touch()
while rank == "0" or not (folder / "ready-0").exists():
    time.sleep(0.1)
sys.exit(2)
"""
    node = begin(tmp_path, program, restarts=1)
    out, err = node.communicate(timeout=300)
    assert node.returncode == 2
    logs = tmp_path / "run" / "logs"
    assert re.fullmatch(rf"error \(rank 1\): ended with status 2; logs: {logs}/\S+\n", err)
    assert set(out.splitlines()) == {"ready 0"}  # one rank shows what it prints
    assert len([*logs.glob("*/amo_*/attempt_1/1/stderr.log")]) == 1
    assert "exitcode: 2" in next(logs.glob("*/torchrun.txt")).read_text()
    expected = {f"{name}={value}" for name, value in environment.variables(2).items()}
    expected |= {f"AMO_LAUNCHER={node.pid}", "AMO_DEVICE=cpu"}
    expected.add("TORCHELASTIC_USE_AGENT_STORE=False")
    for rank in range(2):
        assert expected <= {*(tmp_path / f"variables-{rank}").read_text().splitlines()}


@pytest.mark.parametrize(
    ("is_told", "outcomes", "status"),
    [
        (True, ("stopped", "stopped"), 75),
        (True, ("done", "done"), 0),
        (True, ("stopped", ""), 143),
        (True, ("unsaved", "unsaved"), 143),
        (False, ("stopped", "stopped"), 75),  # by a signal to another node
        # torchrun returns as after success if ranks hang in the kernel, which leave nothing.
        (False, ("", ""), 1),
    ],
)
def test_a_stop_continues_if_every_rank_has_saved(
    tmp_path: Path, is_told: bool, outcomes: tuple[str, str], status: int
) -> None:
    program = f"""
def save(*_):
    if outcome := {outcomes}[int(rank)]:
        write_exit_reason(outcome)
    os._exit(0)

signal.signal(signal.SIGTERM, save)
(folder / f"ready-{{rank}}").touch()
time.sleep(600 * {is_told})
save()
"""
    node = begin(tmp_path, program)
    while is_told and len([*tmp_path.glob("ready*")]) < 2:
        assert node.poll() is None
        time.sleep(0.05)
    if is_told:
        node.send_signal(signal.SIGTERM)
    _, errors = node.communicate(timeout=300)
    assert node.returncode == status
    assert bool(errors) == (status in (1, 143))


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RendezvousClosedError(), 1),
        (SignalException("x", signal.SIGINT), 130),
    ],
)
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # the launcher's log
def test_an_end_without_the_ranks_reasons_is_a_failure(
    error: Exception, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.distributed.run.run", mock.Mock(side_effect=error))
    checkpoint = SimpleNamespace(stop_seconds=60)
    config = SimpleNamespace(dump_folder=str(tmp_path / "run"), checkpoint=checkpoint)
    assert command.start([], ["rank.py"], config, 2) == status


@pytest.mark.parametrize(
    ("said", "is_first_process"), [("loading PyTorch", True), ("Training on 2 ranks", False)]
)
def test_a_stop_before_ranks_start_is_no_failure(
    tmp_path: Path, said: str, is_first_process: bool
) -> None:
    """As process 1, too, for which the kernel drops a signal without a handler."""
    words = [*TRAIN, CONFIG, f"--dump_folder={tmp_path / 'run'}"]
    if is_first_process:
        own_namespace = ["unshare", "--pid", "--fork", "--kill-child"]
        if subprocess.run([*own_namespace, "true"]).returncode:
            pytest.skip("needs the right to make a namespace of processes")
        words = [*own_namespace, *words]
    node = Command(words, tmp_path)
    node.wait_until(lambda: said in node.output())
    os.kill(node.first_process() if is_first_process else node.process.pid, signal.SIGTERM)
    assert "stopped before the first step: there is nothing to save" in node.end(75)


# ------------------------------------------------------------------ why ranks failed

OTHERS = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer"


def failure(folder: Path, status: int, message: str = "", when: int = 0) -> ProcessFailure:
    file = folder / f"{status}-{len([*folder.iterdir()])}.json"
    if message:
        record = {"message": message, "extraInfo": {"timestamp": str(when), "py_callstack": ""}}
        file.write_text(json.dumps({"message": record}))
    return ProcessFailure(0, 1, status, str(file))


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ((1, "OSError: b", 7), (1, "OSError: it\nis gone", 5), "1): OSError: it is"),
        ((1, OTHERS, 5), (-9, "", 0), "1): ended by SIGKILL"),
        ((1, OTHERS, 5), (-15, "", 0), "1): ended by SIGTERM"),  # by torchrun, after the failure
        ((1, OTHERS, 5), (1, "ZeroDivisionError: a", 7), "1): ZeroDivisionError: a"),
        ((1, "OSError: b", 5), (2, "ValueError: lr: found 0", 7), "1): lr: found 0"),
        ((1, "OSError: b", 5), (3, "", 0), "0): OSError: b"),
    ],
)
def test_the_reason_is_that_of_the_rank_that_failed_first(
    tmp_path: Path, first: Any, second: Any, expected: str
) -> None:
    failures = {0: failure(tmp_path, *first), 1: failure(tmp_path, *second)}
    reason, status = command.explain(failures)
    assert reason.startswith(f"error (rank {expected}")
    assert status == max(failures[int(expected[0])].exitcode, 1)
