"""Files of a run: replaced as a whole, grown by whole lines, read on after any kill."""

from __future__ import annotations

import ast
import errno
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.source_tree import ROOT, sources
from torchtitan_ext.runs import files, records, run_files

WRITES_ELSEWHERE = {
    "amo_dist/tools/files.py",  # the one that is meant
    "torchtitan_ext/runs/run_files.py",  # the lock, whose file must stay the same
    "torchtitan_ext/tools/export.py",  # into a scratch folder, which is moved
    "torchtitan_ext/data/pipeline.py",  # under a scratch name
    "torchtitan_ext/signals.py",  # how a rank ended, in torchrun's scratch folder
}


@pytest.mark.slow
def test_readers_read_on_wherever_a_writer_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.unit.killed_writers", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["problems"] == []
    # Each at least before, amid and after one write.
    assert all(count >= 3 for count in found["kills"].values())


def _writes(call: ast.Call) -> bool:
    """Whether a call writes a file: ``write_text`` and the like, or an ``open`` to write."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    given = [*call.args, *(word.value for word in call.keywords)]
    texts = [one.value for one in given if isinstance(one, ast.Constant)]
    is_open = name == "open" and any(re.fullmatch(r"[wax]b?\+?t?", str(text)) for text in texts)
    return is_open or name in ("write_text", "write_bytes", "copyfile")


def test_whatever_writes_a_file_of_a_run_does_it_so() -> None:
    found = {
        str(path.relative_to(ROOT))
        for path in sources("torchtitan_ext")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and _writes(node)
    }
    assert found <= WRITES_ELSEWHERE


def test_a_link_of_the_scratch_files_name_is_not_written_through(tmp_path: Path) -> None:
    secret, path = tmp_path / "secret", tmp_path / "status.json"
    secret.write_text("as it was")
    path.with_name(path.name + files.SCRATCH).symlink_to(secret)
    files.replace(path, "new")
    assert (secret.read_text(), path.read_text()) == ("as it was", "new")
    assert not path.is_symlink()


def test_a_file_keeps_its_mode_and_a_link_its_target(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    files.replace(link, "new \N{EN DASH} ä")
    assert target.read_text(encoding="utf-8") == "new \N{EN DASH} ä"
    assert link.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "target"]


def test_what_is_no_file_is_written_to() -> None:
    files.replace(Path(os.devnull), "gone")
    assert not Path(os.devnull).is_file()


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    files.append_lines(path, ["one", "two"])
    whole = os.write

    def full(file: int, data: memoryview) -> int:
        if len(data) > 4:
            return whole(file, data[:4])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        files.append_lines(path, ["three"])
    with pytest.raises(OSError, match="No space left"):
        files.replace(path, "other")
    assert path.read_text() == "one\ntwo\n"
    assert [one.name for one in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("line", [b"\xff\xfe", b"{", b"[1]", b"{}"])
def test_a_stray_byte_does_not_keep_a_run_from_going_on(
    tmp_path: Path, line: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    content = b'{"step": 1}\n' + line + b'\n{"step": 2}\n{"step": 3}\n'
    path.write_bytes(content)
    if line != b"{}":  # an object, if of another kind
        with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: "):
            records.read_records(path)
    with caplog.at_level(logging.WARNING):
        records.drop_from(path, 3)
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'
    if line != b"{}":
        assert "metrics.jsonl, line 2: " in caplog.text
        assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == content


def test_a_broken_file_of_a_run_is_named_with_its_path(tmp_path: Path) -> None:
    for text, told in (("{", "not JSON"), ("[]", "found list"), ("\0", "not JSON")):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(ValueError, match=rf"{tmp_path}/run.json: {told}"):
            run_files.read_config(tmp_path)
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(ValueError, match=rf"{tmp_path}/plan.json: "):
        run_files.read_plan(tmp_path)
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ValueError, match=r"metrics\.jsonl: cannot be read: Is a directory"):
        records.read_records(tmp_path / "metrics.jsonl")
    (tmp_path / "lock").mkdir()
    with pytest.raises(ValueError, match=r"dump_folder: cannot write .*lock: Is a directory"):
        run_files.RunFiles(tmp_path)
