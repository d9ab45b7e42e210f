"""Ranks under torchrun's launcher: their environment, restarts, stops and exit statuses."""

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

from tests.examples import ROOT
from torchtitan_ext import cli, environment
from torchtitan_ext import train as rank_train
from torchtitan_ext.plugin import machine, patches, trainer
from torchtitan_ext.tools import train as command

CONFIG = str(ROOT / "configs" / "debug_llama3.toml")


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """What is set for ranks is gone afterwards."""
    with mock.patch.dict(os.environ):
        for name in list(os.environ):
            if name.startswith(("OMP_", "PYTORCH_", "NCCL_", "TORCH", "AMO_DEVICE")):
                del os.environ[name]
        for name in command.ALONE:
            os.environ.pop(name, None)
        yield


# ------------------------------------------------------------------ what a node has


def with_device(patch: pytest.MonkeyPatch, kind: str | None, count: int = 0) -> None:
    patch.delenv("AMO_DEVICE", raising=False)
    patch.setattr("torch._utils._get_available_device_type", lambda: kind)
    patch.setattr("torch.cuda.device_count", lambda: count)


def test_a_node_without_accelerator_is_an_error_unless_it_is_meant(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_device(monkeypatch, None)
    started = mock.Mock(return_value=0)
    monkeypatch.setattr(command, "start", started)
    words = ["train", CONFIG, "--nodes", "2", "--head", "node0:29500"]
    assert cli.main(words) == 2
    told = capsys.readouterr().err
    assert re.match(r"error: AMO_DEVICE: found no accelerator on \S+, expected one .*=cpu", told)
    monkeypatch.setenv("AMO_DEVICE", "cpu")
    assert cli.main([*words, "--ranks", "1", "--restarts=3"]) == 0
    (_, _, ranks), more = started.call_args
    assert ranks == 1
    assert more == {
        "nodes": 2,
        "head": "node0:29500",
        "run_id": "amo",
        "restarts": 3,
        "numa_binding": None,
    }


def test_a_node_that_lost_an_accelerator_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with_device(monkeypatch, "cuda", 7)
    assert command.pick_ranks(None, 2, None) == 7  # and not as many as would fit
    with pytest.raises(ValueError, match=r"--ranks: found 8, expected 1 to 7, the GPUs of "):
        command.pick_ranks(8, 2, None)


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
    ("words", "told"),
    [
        (["--nodes", "2"], "--head: found None, expected host:port of one of the nodes"),
        (["--nodes", "2", "--head", "node0"], "--head: found 'node0', expected host:port"),
        (["--nodes", "four"], "--nodes: found 'four', expected an integer >= 1"),
        (["--run-id", "../x"], "--run-id: found '../x', expected letters, digits"),
        (["--numa-binding", "node"], "--numa-binding: found 'node', expected none without GPUs"),
        (["--restarts", "-1"], "--restarts: found -1, expected an integer >= 0"),
        (
            ["--dump_folder=s3://bucket/run"],
            "dump_folder: found 's3://bucket/run', expected a folder of a file system",
        ),
        (
            ["--nodes", "2", "--head", "a:1", "--ranks", "3", "--training.global_batch_size=4"],
            "training.global_batch_size: found 4, expected a multiple of 24",
        ),
    ],
)
def test_mistakes_are_told_before_any_rank_starts(
    words: list[str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("AMO_DEVICE", "cpu")
    monkeypatch.setattr(command, "start", lambda *_, **__: pytest.fail("started"))
    assert cli.main(["train", CONFIG, *words]) == 2
    assert told in capsys.readouterr().err


# ------------------------------------------------------------------ one environment


def test_what_is_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.variables(10**6)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:native")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    found = environment.variables(1)
    assert found.keys() == {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "OMP_NUM_THREADS"}
    environment.set_variables(1)
    assert os.environ["NCCL_DEBUG"] == "INFO"
    assert environment.variables(1) == {}


def test_a_rank_of_any_launcher_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
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

folder, program, options = sys.argv[1:]
command._tokenize_first = lambda config: None
command.RANK = ("-u", "-c", program)
checkpoint = SimpleNamespace(stop_seconds=60)
config = SimpleNamespace(dump_folder=folder + "/run", checkpoint=checkpoint)
sys.exit(command.start([folder], config, 2, **json.loads(options)))
"""

RANK = """
import os, pathlib, signal, sys, time
rank, start = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
folder = pathlib.Path(sys.argv[1])
(folder / f"start{start}-{rank}").touch()
"""


def begin(folder: Path, program: str, **options: Any) -> subprocess.Popen[str]:
    """A launcher of two ranks that run ``program``: torch's leaves files open in its process."""
    return subprocess.Popen(
        [sys.executable, "-c", NODE, str(folder), RANK + program, json.dumps(options)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_mistake_that_ranks_see_is_told_after_the_restarts(tmp_path: Path) -> None:
    program = """
print("seen", rank, flush=True)
(folder / f"seen{start}-{rank}").touch()
while rank == "0" or not (folder / f"seen{start}-0").exists():
    time.sleep(0.1)
sys.exit(2)
"""
    node = begin(tmp_path, program, restarts=1)
    out, err = node.communicate(timeout=300)
    assert node.returncode == 2
    logs = tmp_path / "run" / "logs"
    assert re.fullmatch(rf"error \(rank 1\): ended with status 2; logs: {logs}/\S+\n", err)
    assert set(out.splitlines()) == {"seen 0"}  # one rank shows what it prints
    starts = sorted(path.name for path in tmp_path.glob("start*"))
    assert starts == ["start0-0", "start0-1", "start1-0", "start1-1"]
    assert len([*logs.glob("*/amo_*/attempt_1/1/stderr.log")]) == 1
    assert "exitcode: 2" in next(logs.glob("*/torchrun.txt")).read_text()


def test_a_dead_rank_is_started_again_in_the_same_environment(tmp_path: Path) -> None:
    program = """
if start == "0" and rank == "0":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600 if start == "0" else 0)
if os.environ["AMO_LAUNCHER"] == str(os.getppid()):
    (folder / f"found-{rank}").write_text("\\n".join(f"{k}={v}" for k, v in os.environ.items()))
"""
    node = begin(tmp_path, program, restarts=1)
    assert node.communicate(timeout=300) == ("", "")
    assert node.returncode == 0
    expected = {f"{name}={value}" for name, value in environment.variables(2).items()}
    for rank in range(2):
        found = (tmp_path / f"found-{rank}").read_text().splitlines()
        assert {*expected, "AMO_DEVICE=cpu", "TORCHELASTIC_USE_AGENT_STORE=False"} <= {*found}


@pytest.mark.parametrize(
    ("outcomes", "status", "line"),
    [
        (("stopped", "stopped"), 75, ""),
        (("done", "done"), 0, ""),
        (("stopped", ""), 143, "error: stopped by SIGTERM, and not every rank saved and left"),
        (("unsaved", "unsaved"), 143, "error: stopped, and nothing is saved: checkpoints are off"),
    ],
)
def test_a_stop_says_go_on_if_every_rank_has_saved(
    tmp_path: Path, outcomes: tuple[str, str], status: int, line: str
) -> None:
    program = f"""
from torchtitan_ext.signals import leave_outcome

def save(*_):
    if outcome := {outcomes}[int(rank)]:
        leave_outcome(outcome)
    os._exit(0)

signal.signal(signal.SIGTERM, save)
(folder / f"ready-{{rank}}").touch()
time.sleep(600)
"""
    node = begin(tmp_path, program)
    while len([*tmp_path.glob("ready*")]) < 2:
        assert node.poll() is None
        time.sleep(0.05)
    node.send_signal(signal.SIGTERM)
    output, errors = node.communicate(timeout=300)
    assert node.returncode == status
    assert errors.startswith(line)
    assert bool(errors) == bool(line)
    assert (output == "Stopped; the same command goes on.\n") == (status == 75)


def test_a_stop_that_another_node_was_sent_says_go_on(tmp_path: Path) -> None:
    """The ranks of this node leave by the vote, and their launcher hears of no signal."""
    program = """
from torchtitan_ext.signals import leave_outcome
leave_outcome("stopped")
"""
    node = begin(tmp_path, program)
    assert node.communicate(timeout=300) == ("Stopped; the same command goes on.\n", "")
    assert node.returncode == 75


def test_a_rank_whose_launcher_died_before_it_asked_ends_at_once() -> None:
    """The kernel signals a death of the parent only after the call that asks for it."""
    program = """
import os, sys, time
from torchtitan_ext.signals import end_with_parent
end_with_parent(int(sys.argv[1]))
time.sleep(600)
"""
    command = [sys.executable, "-c", program]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    orphan = subprocess.run([*command, "1"], env=environment, timeout=60, check=False)
    assert orphan.returncode == -signal.SIGTERM
    with subprocess.Popen([*command, str(os.getpid())], env=environment) as child:
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(2)
        child.kill()


# ------------------------------------------------------------------ ends without processes


def config_for(folder: Path) -> Any:
    checkpoint = SimpleNamespace(stop_seconds=60)
    return SimpleNamespace(dump_folder=str(folder / "run"), checkpoint=checkpoint)


def ended(patch: pytest.MonkeyPatch, folder: Path, end: Any) -> tuple[int, Any]:
    """The exit status if torchrun's launcher ends like this, and the config that it got."""
    patch.setattr(command, "_tokenize_first", lambda _: None)
    call = mock.Mock(side_effect=end) if isinstance(end, Exception) else mock.Mock(return_value=end)
    launch = mock.Mock(return_value=call)
    patch.setattr("torch.distributed.launcher.api.elastic_launch", launch)
    status = command.start(["x"], config_for(folder), 2, nodes=2, head="a:1", numa_binding="node")
    return status, launch.call_args.args[0]


def test_ranks_that_hang_in_the_kernel_are_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torchrun's launcher then returns as after success, with the results of no rank."""
    status, asked = ended(monkeypatch, tmp_path, {})
    assert status == 1
    assert "error: some ranks did not exit after SIGKILL" in capsys.readouterr().err
    assert ended(monkeypatch, tmp_path, {2: None, 3: None})[0] == 0
    assert asked.shutdown_timeout > 60  # ranks end themselves first, and say so
    assert asked.numa_options.affinity_mode.value == "node"
    assert (asked.min_nodes, asked.max_nodes, asked.nproc_per_node) == (2, 2, 2)


def test_a_meeting_that_fails_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch.distributed.elastic.rendezvous import RendezvousClosedError

    assert ended(monkeypatch, tmp_path, RendezvousClosedError())[0] == 1
    told = capsys.readouterr().err
    assert told.startswith("error: not all nodes met at a:1: RendezvousClosedError; another node")
    assert ended(monkeypatch, tmp_path, SignalException("x", signal.SIGINT))[0] == 130


# ------------------------------------------------------------------ why ranks failed

OTHERS = "RuntimeError: [/third_party/gloo/transport/tcp/pair.cc:534] Connection reset by peer"


def failure(folder: Path, status: int, message: str = "", when: int = 0) -> ProcessFailure:
    file = folder / f"{status}-{len([*folder.iterdir()])}.json"
    if message:
        told = {"message": message, "extraInfo": {"timestamp": str(when), "py_callstack": ""}}
        file.write_text(json.dumps({"message": told}))
    return ProcessFailure(0, 1, status, str(file))


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (
            (1, "OSError: b", 7),
            (1, "OSError: the device\nis gone", 5),
            "1): OSError: the device is",
        ),
        ((1, OTHERS, 5), (-9, "", 0), "1): ended by SIGKILL; its memory may have run out"),
        ((1, OTHERS, 5), (-15, "", 0), "1): ended by SIGTERM"),  # by torchrun, after the failure
        ((1, OTHERS, 5), (1, "ZeroDivisionError: here", 7), "1): ZeroDivisionError: here"),
        ((1, "OSError: b", 5), (2, "ValueError: lr: found 0", 7), "1): lr: found 0"),
        ((1, "OSError: b", 5), (3, "", 0), "0): OSError: b"),
    ],
)
def test_the_reason_is_that_of_the_rank_that_failed_first(
    tmp_path: Path, first: Any, second: Any, expected: str
) -> None:
    failures = {0: failure(tmp_path, *first), 1: failure(tmp_path, *second)}
    told, status = command.explain(failures)
    assert told.startswith(f"error (rank {expected}")
    assert status == max(failures[int(expected[0])].exitcode, 1)


@pytest.mark.parametrize("restarts", ["0", "2"])
def test_a_store_that_all_restarts_share_is_told(
    restarts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert rank_train._shares_store() == (restarts != "0")
