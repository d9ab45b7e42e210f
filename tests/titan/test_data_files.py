"""Files of documents: found, read from any row on, and judged row by row."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.titan.data_corpus import write_arrow, write_jsonl, write_parquet
from torchtitan_ext.data.files import find_files
from torchtitan_ext.data.rows import BadRow, BadRows, judge, read_rows

TEXTS = [f"text {i} é" for i in range(8)]
ALL = (0.01, 0, {})
"""Of `BadRows`: a share of a hundredth, from the first row on."""


def write_arrow_file(path: Path, rows: Any) -> Path:
    return write_arrow(path, rows, stream=False)


WRITERS: dict[str, Callable[[Path, Any], Path]] = {
    "a.jsonl": write_jsonl,
    "a.jsonl.gz": write_jsonl,
    "a.parquet": write_parquet,
    "a.arrow": write_arrow,
    "b.arrow": write_arrow_file,
}


@pytest.mark.parametrize("start", [0, 1, 4, 8])
@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_rows_from_any_one_on(name: str, start: int, tmp_path: Path) -> None:
    rows = [{"id": i / 2, "body": text} for i, text in enumerate(TEXTS)]
    path = WRITERS[name](tmp_path / name, rows)
    found = list(read_rows(str(path), ("body", "id"), start))
    assert [number for number, _ in found] == list(range(start, 8))
    judged = [judge(row, ("body", "id")) for _, row in found]
    assert judged == [(TEXTS[i], i / 2) for i in range(start, 8)]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.parquet", "a.arrow"])
def test_a_broken_file_is_named(name: str, tmp_path: Path) -> None:
    path = WRITERS[name](tmp_path / name, [{"text": text * 50} for text in TEXTS])
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=rf"cannot read .*{name}"):
        list(read_rows(str(path), ("text",)))


BAD_LINES = {
    b'{"other": 1}': "missing",
    b'{"text": null}': "missing",
    b'{"text": 3}': "wrong type",
    b'{"text": "caf\xe9"}': "not UTF-8",
    b'{"text": "\\ud83d"}': "not UTF-8",
    b'{"text": " \\n"}': "empty",
    b"": "empty",
    b'{"text": "cut': "not JSON",
    b'["text"]': "wrong type",
    b'{"text": "good", "score": "high"}': "no score",
    b'{"text": "good", "score": NaN}': "no score",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_bad_row_has_its_reason(line: bytes) -> None:
    fields = ("text", "score") if BAD_LINES[line] == "no score" else ("text",)
    with pytest.raises(BadRow, match=BAD_LINES[line]):
        judge(line, fields)


def test_a_share_of_bad_rows_is_left_out_and_more_are_an_error() -> None:
    bad = BadRows(*ALL)
    for row in range(10):
        bad.add(f"a.jsonl, row {row + 1}", "empty")
        bad.num_rows += 1
        bad.check()  # ten of the first thousand are a hundredth
    with pytest.raises(ValueError, match=r"dataloader\.max_bad_rows: found 10 bad rows among 10 "):
        bad.check(at_end=True)
    bad.num_rows = 1000
    bad.check(at_end=True)
    bad.add("b.jsonl, row 7", "missing")
    with pytest.raises(ValueError, match=r"11 .*10 empty, 1 missing.*last: b\.jsonl, row 7: miss"):
        bad.check()


def test_folders_files_and_globs_are_found_in_order(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".cache").mkdir()
    for name in ("b.jsonl", "a.parquet", "sub/c.jsonl.gz", ".cache/d.jsonl", "e.txt", "f.json"):
        (tmp_path / name).write_text(name)
    (tmp_path / "empty.txt").touch()
    found = find_files(str(tmp_path))
    assert [Path(url).name for url in found.urls] == ["a.parquet", "b.jsonl", "e.txt", "c.jsonl.gz"]
    assert find_files(str(tmp_path), "*.json").urls == (str(tmp_path / "f.json"),)
    one = find_files(str(tmp_path / "b.jsonl"))
    assert one == find_files(str(tmp_path / "b.*"))
    assert one.digest != found.digest
    # An edit of the same length is another corpus.
    stat = (tmp_path / "b.jsonl").stat()
    os.utime(tmp_path / "b.jsonl", ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert find_files(str(tmp_path / "b.jsonl")).digest != one.digest
    with pytest.raises(ValueError, match="found no file in"):
        find_files(str(tmp_path), "*.md")
    with pytest.raises(ValueError, match="no such file or folder"):
        find_files(str(tmp_path / "nowhere"))


def test_a_missing_decompressor_is_an_error_before_the_first_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    whole = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "zstandard" else whole(name)
    )
    with pytest.raises(ValueError, match=r"a\.jsonl\.zst: .*pip install zstandard"):
        find_files(str(tmp_path))
