"""What a run leaves in its folder, and the lines it prints."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest

from torchtitan_ext.runs import run_files
from torchtitan_ext.runs.records import read_records
from torchtitan_ext.runs.run_files import RunFiles


def test_a_resume_drops_what_lies_beyond(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = RunFiles(tmp_path)
    files.start(1)
    # 1/3 has no short decimal form: the file must bring it back to the last bit.
    for step in (1, 2, 3, 4):
        files.append({"step": step, "loss": step / 3})
    again = RunFiles(tmp_path)
    again.start(3)
    again.append({"step": 3, "loss": float("nan"), "optimizer": {"x": float("inf")}})
    assert read_records(tmp_path / "metrics.jsonl") == [
        {"step": 1, "loss": 1 / 3},
        {"step": 2, "loss": 2 / 3},
        {"step": 3, "loss": None, "optimizer": {"x": None}},
    ]
    assert not caplog.records
    again.start(1)
    assert "dropped 3 records from step 1 on" in caplog.text  # of another run, it may be
    assert read_records(tmp_path / "metrics.jsonl") == []


def test_two_runs_do_not_share_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_files.require_unlocked(tmp_path / "missing", 600)
    held = run_files.lock(tmp_path)
    for claim in (run_files.lock, run_files.require_unlocked):
        with pytest.raises(ValueError, match=rf"^dump_folder: .* process {os.getpid()} on "):
            claim(tmp_path, 0.1)
    assert capsys.readouterr().out.count("waiting at most 0 s") == 2
    threading.Timer(0.2, held.release).start()
    run_files.lock(tmp_path, 60).release()  # waited for
    run_files.require_unlocked(tmp_path, 0)


@pytest.mark.parametrize(("number", "is_refused"), [(errno.EOPNOTSUPP, False), (errno.EIO, True)])
def test_a_file_system_without_locks_trains_with_a_warning(
    number: int,
    is_refused: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(ValueError, match=r"cannot lock") if is_refused else nullcontext():
        run_files.lock(tmp_path).release()
        assert "has no locks: start no second run in it" in caplog.text


def test_the_newest_complete_checkpoint_of_a_run_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "of any [name]"
    for step, last in ((20, ".metadata"), (100, ".metadata"), (200, "__0_0.distcp")):
        (folder / f"step-{step}").mkdir(parents=True)
        (folder / f"step-{step}" / last).touch()  # the last save was cut short
    for path in (tmp_path, folder):
        assert run_files.find_checkpoint(path) == folder / "step-100"
    assert run_files.find_checkpoint(folder / "step-20") == folder / "step-20"
    (tmp_path / "third" / "step-300").mkdir(parents=True)
    (tmp_path / "third" / "step-300" / ".metadata").touch()
    with pytest.raises(ValueError, match=r"of any \[name\] and .*third"):
        run_files.find_checkpoint(tmp_path)
