"""Files of a run: replaced as a whole, and read on whatever a killed process left."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from torchtitan_ext.runs import files, records, run_files


def test_a_file_is_replaced_and_a_link_keeps_its_target(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    files.replace(link, "new \N{EN DASH} ä")
    assert target.read_text(encoding="utf-8") == "new \N{EN DASH} ä"
    assert link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "target"]
    files.replace(Path(os.devnull), "gone")
    assert not Path(os.devnull).is_file()


def test_a_failed_write_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=r"plan\.json"):
        files.replace(path, "new")
    assert path.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["plan.json"]


def test_a_pipe_that_nobody_reads_is_no_place_to_write(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.json")
    with pytest.raises(OSError, match=r"run\.json"):
        files.replace(tmp_path / "run.json", "new")


@pytest.mark.parametrize("line", [b"\xff\xfe", b"{", b"[1]", b"{}"])
def test_a_stray_byte_does_not_keep_a_run_from_going_on(
    tmp_path: Path, line: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 2}\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: found "):
        run_files.read_metrics(tmp_path)
    with caplog.at_level(logging.WARNING):
        records.drop_from(path, 3)
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'
    assert ("cannot be read" in caplog.text) == (line != b"{}")
