"""Files of documents: found, read from any row on, and judged row by row."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.data_corpus import write_arrow, write_jsonl, write_parquet
from torchtitan_ext.data.files import Hub, find_files, format_of, hub_files
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


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_bad_text_in_arrow_columns_fails_only_its_row(suffix: str, tmp_path: Path) -> None:
    import pyarrow as pa

    # A string column that holds what is no UTF-8: Arrow takes the bytes as they are.
    column = pa.array([b"good", b"caf\xe9", None, b"", b"fine"], pa.binary())
    column = pa.Array.from_buffers(pa.string(), 5, column.buffers())
    table = pa.table({"text": column})
    path = tmp_path / f"a.{suffix}"
    if suffix == "parquet":
        import pyarrow.parquet as pq

        pq.write_table(table, path)
    else:
        with pa.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)
    found = []
    for _, row in read_rows(str(path), ("text",)):
        try:
            found.append(judge(row, ("text",))[0])
        except BadRow as error:
            found.append(str(error))
    assert found == ["good", "not UTF-8", "missing", "empty", "fine"]


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


def test_a_format_is_known_by_its_suffix() -> None:
    assert format_of("hf://datasets/a/b@c/train/x.jsonl.zst") == "jsonl"
    assert format_of("x.parquet.gz") == format_of("x.md") == "text"


def test_the_standard_library_is_real_text() -> None:
    library = find_files("stdlib")
    # The smallest installations, without tests and idlelib, still have several hundred modules.
    assert len(library.urls) > 300


def test_files_of_a_hub_repository_are_those_that_datasets_resolves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A folder laid out like a repository is resolved by the same code, without a network.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for split in ("train", "test"):
        (tmp_path / "data" / split).mkdir(parents=True)
        write_parquet(tmp_path / "data" / split / "0.parquet", [{"text": split}])
    for split in ("train", "test"):
        (url,) = hub_files(str(tmp_path), Hub(split=split)).urls
        assert [judge(row, ("text",))[0] for _, row in read_rows(url, ("text",))] == [split]
    with pytest.raises(ValueError, match=r"--split: found 'dev', expected one of"):
        hub_files(str(tmp_path), Hub(split="dev"))
