"""What a run leaves in its folder, and the lines it prints."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import time
from pathlib import Path
from typing import Any, TextIO

import pytest

from torchtitan_ext import cli
from torchtitan_ext.plugin.metrics import line_tail
from torchtitan_ext.runs.folder import RunFolder, changes
from torchtitan_ext.runs.records import read_records
from torchtitan_ext.runs.run_files import RunFiles, lock, require_unlocked
from torchtitan_ext.tools import quickstart

CONFIG: dict[str, Any] = {
    "optimizer": {"lr": 0.1, "betas": (0.9, 0.95)},
    "metrics": {"log_freq": 1},
}


def checkpoint(folder: Path, step: int, last_file: str = ".metadata") -> None:
    path = folder / "checkpoint" / f"step-{step}"
    path.mkdir(parents=True)
    (path / last_file).write_text("")


def test_a_resumed_run_drops_what_lies_beyond_its_checkpoint(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    files.start(1)
    # 1/3 has no short decimal form: the file must bring it back to the last bit.
    for step in (1, 2, 3, 4):
        files.append({"step": step, "loss": step / 3})
    files.close()
    again = RunFiles(tmp_path)
    again.start(3)
    again.append({"step": 3, "loss": float("nan"), "optimizer": {"x": float("inf")}})
    assert read_records(tmp_path / "metrics.jsonl") == [
        {"step": 1, "loss": 1 / 3},
        {"step": 2, "loss": 2 / 3},
        {"step": 3, "loss": None, "optimizer": {"x": None}},
    ]
    again.start(1)
    again.close()
    assert read_records(tmp_path / "metrics.jsonl") == []


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    assert read_records(path) == [{"step": 1}]
    path.write_text('{"step": 1, "lo\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 1: not JSON"):
        read_records(path)


def test_the_plan_is_saved_once_and_forgotten_by_a_new_run(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    assert [files.save_plan("{}"), files.save_plan("{}")] == [True, False]
    files.close()
    with contextlib.closing(RunFiles(tmp_path)) as again:
        again.start(1)
    assert not (tmp_path / "plan.json").exists()


def test_two_runs_cannot_write_into_one_folder(tmp_path: Path) -> None:
    require_unlocked(tmp_path / "missing", 600)
    files = RunFiles(tmp_path)
    with pytest.raises(ValueError, match=rf"process {os.getpid()} on {socket.gethostname()};"):
        RunFiles(tmp_path)
    with pytest.raises(ValueError, match="being written by process"):
        require_unlocked(tmp_path, 600)
    files.close()
    require_unlocked(tmp_path, 600)
    assert (tmp_path / "lock").read_text().startswith(f"{os.getpid()} ")  # who looks leaves nothing


def held_elsewhere(folder: Path, holder: str) -> TextIO:
    """The lock of a run, as another host shows it."""
    held = lock(folder)
    (folder / "lock").write_text(f"{holder}\n")
    return held


def test_a_run_on_another_host_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a node that is dead network file systems keep the lock for minutes."""
    held, waited = held_elsewhere(tmp_path, "7 on far"), [0.0]

    def sleep(seconds: float) -> None:
        waited[0] += seconds
        if waited[0] > 45:
            held.close()

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: waited[0])
    RunFiles(tmp_path).close()
    assert 45 < waited[0] < 50
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2  # one each half minute
    assert all("written by process 7 on far; waiting for it, at most 120 s" in one for one in lines)


@pytest.mark.parametrize("holder", ["7 on far", f"{2**22 + 1} on {socket.gethostname()}", "?"])
def test_a_wait_for_another_host_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holder: str
) -> None:
    """So does one for a process of this host that is gone, whose lock some server has kept."""
    held, waited = held_elsewhere(tmp_path, holder), [0.0]
    monkeypatch.setattr(time, "sleep", lambda s: waited.append(waited.pop() + s))
    monkeypatch.setattr(time, "monotonic", lambda: waited[0])
    with pytest.raises(ValueError, match=rf"by process {re.escape(holder)}, after 600 s; end it"):
        require_unlocked(tmp_path, 600)
    held.close()


def test_who_looks_does_not_hold_up_another_who_looks(tmp_path: Path) -> None:
    RunFiles(tmp_path).close()
    with contextlib.closing(lock(tmp_path, 0, reads=True)):
        require_unlocked(tmp_path, 0)


def test_the_line_of_a_step_ends_with_phase_steps_and_time_to_go() -> None:
    record = {
        "step": 20,
        "phase": "locked",
        "num_steps_by_type": {"attn_q": 6, "attn_k": 3},
        "seconds_per_step": 45.0,
        "tokens_per_second": 4932.4,
        "data_seconds_per_step": 0.4,
    }
    assert line_tail(record, 120) == (
        "  phase: locked       NS steps: 6 3  tokens/s on all ranks: 4,932  to go: 1:15:00 of 120 "
        "steps"
    )
    starved = line_tail({**record, "data_seconds_per_step": 0.5}, 120)
    assert "NS steps: 6 3  waits for data: 500 ms per step  tokens/s" in starved
    assert line_tail({**record, "phase": ""}, 120).startswith(
        "  tokens/s on all ranks: 4,932  to go"
    )


def test_a_new_folder_starts_anew_and_an_unfinished_run_goes_on(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    assert folder.prepare(CONFIG) == 0
    checkpoint(folder.path, 9)
    checkpoint(folder.path, 20)
    checkpoint(folder.path, 30, "__0_0.distcp")
    assert folder.prepare(CONFIG) == 20  # numerically, and of the complete ones
    checkpoint(folder.path, 40, "model.safetensors.index.json")  # the last one may be of weights
    assert folder.prepare(CONFIG) == 40


def test_only_fields_that_matter_for_training_may_not_change(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.prepare(CONFIG)
    folder.prepare({**CONFIG, "metrics": {"log_freq": 7}})
    with pytest.raises(ValueError, match=r"optimizer.lr: was 0.1, is 0.2.*--fresh"):
        folder.prepare({**CONFIG, "optimizer": {"lr": 0.2, "betas": (0.9, 0.95)}})
    assert changes({"a": {"b": 1}}, {"a": {"c": None}}) == ["a.b: was 1, is None"]


def test_a_run_leaves_the_config_of_its_latest_start(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    assert not (tmp_path / "run.json").exists()  # a start that fails before its first step
    files.start(1, CONFIG)
    folder = RunFolder(tmp_path)
    assert folder.prepare(CONFIG) == 0
    files.start(7, {**CONFIG, "optimizer": {"lr": 0.2}})
    files.close()
    assert json.loads((tmp_path / "run.json").read_text())["optimizer"] == {"lr": 0.2}
    before = (tmp_path / "run.json").read_bytes()
    with pytest.raises(ValueError, match=r"optimizer.lr: was 0.2, is 0.1"):
        folder.require_same(CONFIG)
    folder.require_same({"optimizer": {"lr": 0.2}, "metrics": {"log_freq": 7}})
    assert (tmp_path / "run.json").read_bytes() == before
    RunFolder(tmp_path / "missing").require_same(CONFIG)


def test_folders_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    folder = RunFolder(tmp_path)
    for act in (folder.delete, lambda: folder.prepare(CONFIG)):
        with pytest.raises(ValueError, match="holds files, but none of a run"):
            act()
    assert (tmp_path / "thesis.tex").exists()


def test_delete_removes_a_run_and_forgives_a_missing_one(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.delete()
    folder.prepare(CONFIG)
    folder.delete()
    assert not folder.path.exists()


@pytest.mark.parametrize(
    ("options", "status", "saved", "told"),
    [
        ([], 0, 120, "Trained in 0 s."),
        ([], 75, 7, "Stopped; step 7 of 120 is saved, and the same command goes on from there."),
        # Some ranks were too slow.
        ([], 143, 7, "Stopped; step 7 of 120 is saved, and the same command goes on from there."),
        ([], 130, 0, "Stopped before the first checkpoint; the same command starts anew."),
        (["--checkpoint.no-enable"], 0, 0, "Trained in 0 s."),
    ],
)
def test_the_quickstart_tells_how_training_ended(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    status: int,
    saved: int,
    told: str,
) -> None:
    def train(_arguments: list[str], config: Any, _num_ranks: int) -> int:
        if saved:
            checkpoint(Path(config.dump_folder), saved)
        return status

    monkeypatch.setattr(quickstart.train, "start", train)
    monkeypatch.setattr(quickstart.time, "monotonic", lambda: 0.0)
    arguments = ["quickstart", "--ranks", "2", "--dump_folder", str(tmp_path / "run")]
    is_trained = told.startswith("Trained")
    assert cli.main([*arguments, *options]) == status
    lines = capsys.readouterr().out.splitlines()
    assert told in lines
    assert any(line.startswith("metrics ") for line in lines) == is_trained  # the summary


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "; see amo --help"),
        (
            ["plan", "--ell=attn_q=0.001", "--nonsense"],
            "found unknown --nonsense, expected options of amo plan",
        ),
        (["plan", "--stps", "5"], "found unknown --stps, expected options of amo plan (did you me"),
        (
            ["preflight", "c.toml", "--wrld", "2"],
            "unknown --wrld, expected options of amo preflight (did you mean --world?)",
        ),
        (["train", "c.toml", "--rnks=2"], "unknown --rnks, expected options of amo train (did you"),
        (["quickstart", "--ranks", "0"], "--ranks: found 0, expected an integer >= 1"),
        (["quickstart", "--optimizer.name", "SGD"], "optimizer.name: found 'SGD'"),
        (
            ["quickstart", "--training.global_batch_size", "7"],
            "training.global_batch_size: found 7, expected a multiple of 16",
        ),
        (["quickstart", "--dump_folder", "/dev/null"], "dump_folder: found /dev/null"),
    ],
)
def test_the_front_door_tells_mistakes_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_forked_process_does_not_share_the_claim(tmp_path: Path) -> None:
    held, (reads, tells) = lock(tmp_path), os.pipe()
    child = os.fork()
    if not child:
        os.write(tells, b"x")  # it runs Python by now, and has let go
        time.sleep(60)
        os._exit(0)
    try:
        assert os.read(reads, 1) == b"x"
        held.close()
        lock(tmp_path).close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
