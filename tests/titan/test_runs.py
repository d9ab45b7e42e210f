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

from torchtitan_ext.plugin.metrics import line_tail
from torchtitan_ext.runs.records import read_records
from torchtitan_ext.runs.run_files import RunFiles, lock, require_unlocked

CONFIG: dict[str, Any] = {
    "optimizer": {"lr": 0.1, "betas": (0.9, 0.95)},
    "metrics": {"log_freq": 1},
}


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


def test_a_run_leaves_the_config_of_its_latest_start(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    assert not (tmp_path / "run.json").exists()  # a start that fails before its first step
    files.start(1, CONFIG)
    files.start(7, {**CONFIG, "optimizer": {"lr": 0.2}})
    files.close()
    assert json.loads((tmp_path / "run.json").read_text())["optimizer"] == {"lr": 0.2}


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
