"""Files of rows: found, read from any row on, judged, and dealt to streams."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.data_corpus import write_arrow, write_jsonl, write_parquet
from torchtitan_ext.data.files import DataError, Hub, find_files, format_of, hub_files
from torchtitan_ext.data.rows import BadRow, BadRows, Part, deal, read_parts, read_rows, texts

TEXTS = [f"text {i} é" for i in range(8)]


def write_arrow_file(path: Path, rows: Any) -> Path:
    return write_arrow(path, rows, stream=False)


WRITERS: dict[str, Callable[[Path, Any], Path]] = {
    "a.jsonl": write_jsonl,
    "a.jsonl.gz": write_jsonl,
    "a.parquet": write_parquet,
    "a.arrow": write_arrow,
    "b.arrow": write_arrow_file,
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_wanted_rows_with_their_numbers(name: str, tmp_path: Path) -> None:
    rows = [{"id": i, "body": text} for i, text in enumerate(TEXTS)]
    path = WRITERS[name](tmp_path / name, rows)
    found = list(read_rows(str(path), ("body", "id", "absent"), Part(0, 1, 5)))
    # Text is judged later, row by row: Arrow's comes undecoded, JSON's is decoded with its line.
    plain = [(n, (b.decode() if isinstance(b, bytes) else b, *more)) for n, (b, *more) in found]
    assert plain == [(i, (TEXTS[i], i, None)) for i in (1, 6)]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.parquet", "a.arrow"])
def test_a_broken_file_is_named(name: str, tmp_path: Path) -> None:
    path = WRITERS[name](tmp_path / name, [{"text": text * 50} for text in TEXTS])
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=rf"cannot read .*{name}"):
        list(read_rows(str(path), ("text",), Part(0, 0, 1)))


BAD_LINES = [
    b'{"text": "good"}',
    b'{"other": 1}',
    b'{"text": null}',
    b'{"text": 3}',
    b'{"text": "caf\xe9"}',
    b'{"text": "\\ud83d"}',
    b'{"text": " \\n"}',
    b"",
    b'{"text": "cut',
    b'["text"]',
    b'{"text": "also good"}',
]
REASONS = {"missing": 2, "wrong type": 2, "not UTF-8": 2, "empty": 2, "not JSON": 1}


def rows_of(path: Path, bad: BadRows) -> list[str]:
    return [t for _, t in texts(read_parts([str(path)], [Part(0, 0, 1)], ("text",), (0, 0)), bad)]


def test_bad_rows_are_skipped_and_counted_by_reason(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(BAD_LINES))
    bad = BadRows("skip")
    assert rows_of(path, bad) == ["good", "also good"]
    assert bad.counts == REASONS


@pytest.mark.parametrize("number", range(1, 10))
def test_a_bad_row_is_named_with_its_file_and_number(number: int, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join([BAD_LINES[0]] * number + [BAD_LINES[number], b""]))
    with pytest.raises(ValueError, match=rf"a\.jsonl, row {number + 1}: .*data\.bad_rows"):
        rows_of(path, BadRows("error"))


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
    bad = BadRows("skip")
    assert rows_of(path, bad) == ["good", "fine"]
    assert bad.counts == {"not UTF-8": 1, "missing": 1, "empty": 1}


def test_a_field_of_another_type_or_name_is_bad_in_every_row(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", [{"text": i} for i in range(4)])
    bad = BadRows("skip")
    assert rows_of(path, bad) == []
    assert bad.counts == {"wrong type": 4}
    other = write_parquet(tmp_path / "b.parquet", [{"content": "x"}] * 4)
    with pytest.raises(ValueError, match=r"b\.parquet, row 1: missing"):
        rows_of(other, BadRows("error"))


@given(st.integers(1, 12), st.sampled_from([1, 2, 3, 8, 12]), st.integers(1, 9))
def test_streams_share_every_row_of_every_file_once(
    num_files: int, num_streams: int, num_rows: int
) -> None:
    order = list(reversed(range(num_files)))
    seen = Counter(
        (part.file, row)
        for number in range(num_streams)
        for part in deal(order, number, num_streams)
        for row in range(part.first, num_rows, part.stride)
    )
    assert seen == Counter((file, row) for file in range(num_files) for row in range(num_rows))


def test_folders_files_and_globs_are_found_in_order(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".cache").mkdir()
    for name in ("b.jsonl", "a.parquet", "sub/c.jsonl.zst", ".cache/d.jsonl", "e.txt", "f.json"):
        (tmp_path / name).write_text(name)
    found = find_files(str(tmp_path))
    assert [Path(url).name for url in found.urls] == ["a.parquet", "b.jsonl", "c.jsonl.zst"]
    one = find_files(str(tmp_path / "b.jsonl"))
    assert one == find_files(str(tmp_path / "b.*"))
    assert one.digest != found.digest
    (tmp_path / "b.jsonl").write_text("longer than before")
    assert find_files(str(tmp_path / "b.jsonl")).digest != one.digest
    with pytest.raises(ValueError, match="found no file in"):
        find_files(str(tmp_path / "*.txt"))
    with pytest.raises(ValueError, match="no such file or folder"):
        find_files(str(tmp_path / "nowhere"))


def test_a_format_is_known_by_its_suffix() -> None:
    assert format_of("hf://datasets/a/b@c/train/x.jsonl.zst") == "jsonl"
    assert format_of("x.parquet.gz") is None
    assert format_of("x.json") is None


def test_files_of_a_hub_repository_are_those_that_datasets_resolves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A folder laid out like a repository is resolved by the same code, without a network.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for split in ("train", "test"):
        (tmp_path / "data" / split).mkdir(parents=True)
        write_parquet(tmp_path / "data" / split / "0.parquet", [{"text": split}])
    for split in ("train", "test"):
        found = hub_files(str(tmp_path), Hub(split=split))
        assert [t for u in found.urls for t in rows_of(Path(u), BadRows("error"))] == [split]
    with pytest.raises(ValueError, match=r"data\.split: found 'dev', expected one of"):
        hub_files(str(tmp_path), Hub(split="dev"))


def test_half_a_file_costs_no_decoding_of_the_other_half(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"not JSON\n" * 3 + b'{"text": "x"}\n')
    assert list(read_rows(str(path), ("text",), Part(0, 0, 1), 3)) == [(3, ("x",))]
    (_, first), *_ = read_rows(str(path), ("text",), Part(0, 0, 1))
    assert isinstance(first, BadRow)


@pytest.mark.parametrize(("num_failures", "ends_well"), [(9, True), (10, False)])
def test_a_remote_file_is_opened_again_where_it_broke_off(
    num_failures: int, ends_well: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchtitan_ext.data import rows

    left = num_failures
    waits: list[float] = []

    def flaky(url: str, fields: Any, part: Part, start: int) -> Any:
        nonlocal left
        for number in range(9):
            if number == 5 and left:
                left -= 1
                raise ConnectionError("reset by peer")
            if number in part.wanted(start):
                yield number, (f"row {number}",)

    monkeypatch.setattr(rows, "read_rows", flaky)
    monkeypatch.setattr("time.sleep", waits.append)
    read = read_parts(["hf://a.jsonl"], [Part(0, 1, 2)], ("text",), (0, 0))
    assert [number for *_, number, _ in itertools.islice(read, 2)] == [1, 3]
    if ends_well:
        assert [number for *_, number, _ in read] == [5, 7]
        assert waits == [2, 4, 8, 16, 32, 60, 60, 60, 60]
    else:
        with pytest.raises(
            DataError, match=r"^cannot read hf://a\.jsonl: reset by peer \(10 tries"
        ):
            next(read)
