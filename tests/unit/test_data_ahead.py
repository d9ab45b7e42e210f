"""Reading ahead: the same documents in the same order, from other processes and early."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import itertools
import json
import multiprocessing
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.data_corpus import build, dataset, write_jsonl, write_parquet
from tests.unit.test_data_streams import small_corpus, small_stream
from torchtitan_ext.data import files, rows
from torchtitan_ext.data.ahead import Depth
from torchtitan_ext.data.files import find_files

NUM_BATCHES = 14


def many_files(folder: Path) -> None:
    for i in range(9):
        texts = [chr(65 + (i + j) % 26) * (1 + (5 * i + 3 * j) % 17) for j in range(11 - i)]
        (write_parquet if i % 2 else write_jsonl)(
            folder / f"{i}.{'parquet' if i % 2 else 'jsonl'}", [{"text": text} for text in texts]
        )


CORPORA: dict[str, Callable[[Path], Any]] = {"few files": small_corpus, "many files": many_files}


def loader(folder: Path, world: int = 1, rank: int = 0, **fields: Any) -> Any:
    """Of a rank; twelve streams and batches of eight leave turns over the streams unfinished."""
    config = dataset(folder, "documents", bad_rows="skip", num_streams=12, **fields)
    return build(config, world, rank, batch=8 // world)


def batches(folder: Path, world: int, num: int, saved: Any = (), **fields: Any) -> Any:
    """Global batches, sorted, and the state of all ranks after them."""
    loaders = [loader(folder, world, rank, **fields) for rank in range(world)]
    for one in loaders:
        one.load_state_dict(dict(saved))
    iterators = [iter(one) for one in loaders]
    found = [sorted(row for it in iterators for row in next(it)[1].tolist()) for _ in range(num)]
    return found, {k: v for one in loaders for k, v in one.state_dict().items()}


@pytest.mark.parametrize("corpus", CORPORA)
@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_change_no_batch_and_no_position(
    corpus: str, num_workers: int, tmp_path: Path
) -> None:
    CORPORA[corpus](tmp_path)
    expected, final = batches(tmp_path, 1, NUM_BATCHES, num_workers=0)
    assert any(json.loads(v).get("epoch", 0) for k, v in final.items() if k != "source")
    for world in (1, 2, 4):
        found = batches(tmp_path, world, NUM_BATCHES, num_workers=num_workers)
        assert found == (expected, final)


@pytest.mark.parametrize("corpus", CORPORA)
@pytest.mark.parametrize(
    ("before", "after", "stop"),
    [((2, 2), (4, 1), 1), ((2, 0), (4, 1), 5), ((1, 1), (1, 0), 5), ((4, 1), (2, 2), 9)],
)
def test_a_resume_takes_other_ranks_and_workers(
    corpus: str, before: tuple[int, int], after: tuple[int, int], stop: int, tmp_path: Path
) -> None:
    CORPORA[corpus](tmp_path)
    expected, final = batches(tmp_path, 1, NUM_BATCHES, num_workers=0)
    (world, num_workers), (world_after, num_workers_after) = before, after
    first, saved = batches(tmp_path, world, stop, num_workers=num_workers)
    assert first == expected[:stop]
    rest = batches(tmp_path, world_after, NUM_BATCHES - stop, saved, num_workers=num_workers_after)
    assert rest == (expected[stop:], final)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_asked_twice_goes_on(num_workers: int, tmp_path: Path) -> None:
    many_files(tmp_path)
    expected, _ = batches(tmp_path, 1, 6, num_workers=0)
    one = loader(tmp_path, num_workers=num_workers)
    found = [next(iter(one))[1].tolist() for _ in range(6)]
    assert [sorted(rows) for rows in found] == expected


@pytest.mark.parametrize("num_workers", [1, 2])
def test_finite_streams_end_alike(num_workers: int, tmp_path: Path) -> None:
    many_files(tmp_path)  # in which streams hold unlike numbers of sequences
    lengths = []
    for workers in (0, num_workers):
        one = loader(tmp_path, num_workers=workers, infinite=False)
        lengths.append([labels.tolist() for _, labels in one])
    assert lengths[0] == lengths[1]
    assert len(lengths[0]) > 3


def test_training_draws_the_same_random_numbers(tmp_path: Path) -> None:
    many_files(tmp_path)
    before = torch.get_rng_state()
    next(iter(loader(tmp_path, num_workers=1)))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("batch", "ahead", "prefetch", "expected"),
    [
        (75, 2 * 1125, None, Depth(3, 25, 30)),  # 3 streams of a rank, 15 micro batches a step
        (8, 16, None, Depth(3, 3, 2)),
        (8, 16, 7, Depth(3, 3, 7)),
    ],
)
def test_two_steps_are_read_ahead(
    batch: int, ahead: int, prefetch: int | None, expected: Depth
) -> None:
    assert Depth.of(4, 3, batch, ahead, prefetch) == expected


# ------------------------------------------------------------------ blocks before their turn


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("stop", [0, 1, 7, 30, 55])
def test_a_block_read_ahead_is_the_one_read_in_its_turn(
    number: int, stop: int, tmp_path: Path
) -> None:
    files = small_corpus(tmp_path)
    stream, ahead = small_stream(files, number), small_stream(files, number)
    for _ in range(stop):
        next(stream)

    def at_once(task: Callable[[], Any]) -> Callable[[], Any]:
        result = task()
        return lambda: result

    ahead.read_ahead(at_once)
    ahead.load_state(stream.state())
    for _ in range(90):  # several epochs
        assert next(ahead) == next(stream)
        assert ahead.state() == stream.state()
    assert ahead.skipped == stream.skipped


def test_the_next_block_is_read_while_the_present_one_serves(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": letter} for letter in "abcdefghijkl"])
    stream = small_stream(find_files(str(tmp_path)), num_streams=1, length=2, shuffle_buffer=4)
    read: list[str] = []

    def at_once(task: Callable[[], Any]) -> Callable[[], Any]:
        blocks = task()
        read.extend("".join(sorted(block.texts)) for block in blocks)
        return lambda: blocks

    stream.read_ahead(at_once)
    next(stream)
    assert read == ["efgh"]
    for _ in range(8):  # into the third block
        next(stream)
    assert read == ["efgh", "ijkl", "", "abcd"]  # an epoch ends with no document


# ------------------------------------------------------------------ fewer files than streams

OLD_POSITIONS = {
    0: ({"index": 4, "leftover": 9, "block": 1, "row": 16, "skipped": {}}, "8cd3f8e48e357ce1"),
    1: ({"index": 6, "leftover": 8, "block": 1, "row": 17, "skipped": {}}, "efbc54af9ad9a77e"),
    2: (
        {
            "index": 2,
            "leftover": 20,
            "block": 2,
            "part": 1,
            "row": 10,
            "skipped": {"empty": 1, "wrong type": 1},
        },
        "8ab97eb04ed97497",
    ),
}
"""Positions of the version whose streams had every third row, and a digest of 60 sequences from
there, recorded with it."""


@pytest.mark.parametrize("number", OLD_POSITIONS)
def test_a_position_from_before_ranges_goes_on_by_rows(number: int, tmp_path: Path) -> None:
    stream = small_stream(small_corpus(tmp_path), number)
    position, digest = OLD_POSITIONS[number]
    stream.load_state(json.dumps({"epoch": 0, "num_sequences": 10, "part": 0, **position}))
    drawn = [next(stream) for _ in range(60)]
    assert stream.epoch >= 3
    assert hashlib.sha256(json.dumps(drawn).encode()).hexdigest()[:16] == digest


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "jsonl.gz"])
@pytest.mark.parametrize("num_rows", [0, 1, 7, 40])
def test_ranges_share_every_row_once_and_resume_at_each(
    suffix: str, num_rows: int, tmp_path: Path
) -> None:
    # Lines of unlike lengths, one of them empty.
    texts = ["x" * (7 * i % 23) + str(i) for i in range(num_rows)]
    rows_of = [{"text": text} for text in texts]
    write = write_parquet if suffix == "parquet" else write_jsonl
    path = write(tmp_path / f"a.{suffix}", rows_of) if num_rows else tmp_path / "a.jsonl"
    path.touch()
    seen: list[str] = []
    for number in range(9):
        parts = rows.deal([0], number, 9, by_ranges=True)

        def read(start: tuple[int, int], parts: Any = parts) -> list[Any]:
            read = rows.read_parts([str(path)], parts, ("text",), start)
            return list(rows.texts(read, rows.BadRows("error")))

        whole = read((0, 0))
        seen += [text for _, text in whole]
        for index, (place, _) in enumerate(whole):
            assert read(place) == whole[index + 1 :]
    assert sorted(seen) == sorted(texts)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_a_range_is_all_that_is_decoded(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = write_parquet if suffix == "parquet" else write_jsonl
    path = write(tmp_path / f"a.{suffix}", [{"text": f"{i:03}"} for i in range(90)])
    decoded: list[object] = []
    if suffix == "parquet":
        import pyarrow.parquet as pq

        class Counting(pq.ParquetFile):  # type: ignore[misc]
            def read_row_group(self, group: int, **options: Any) -> Any:
                decoded.extend(range(3 * group, 3 * group + 3))
                return super().read_row_group(group, **options)

        monkeypatch.setattr(pq, "ParquetFile", Counting)
    else:
        parse = rows._parse
        monkeypatch.setattr(
            rows, "_parse", lambda line, fields: decoded.append(line) or parse(line, fields)
        )
    for number in range(9):
        parts = rows.deal([0], number, 9, by_ranges=True)
        assert len(list(rows.read_parts([str(path)], parts, ("text",), (0, 0)))) == 10
    # Ten rows of each stream; in parquet the row groups at both ends have three rows.
    assert len(decoded) == 90 if suffix == "jsonl" else len(decoded) <= 9 * 14


def test_a_bad_row_of_a_range_is_named_by_its_byte(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n' * 5 + b"not JSON\n")
    read = rows.read_parts([str(path)], [rows.Part(0, 1, 2, is_range=True)], ("text",), (0, 0))
    with pytest.raises(ValueError, match=r"a\.jsonl, byte 86: not JSON"):
        list(rows.texts(read, rows.BadRows("error")))


# ------------------------------------------------------------------ ends and errors


def test_a_mistake_is_told_as_without_workers(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' * 40 + "not JSON\n")
    one = build(dataset(tmp_path, "documents", num_streams=1, num_workers=1))
    with pytest.raises(
        ValueError, match=r"^\S+a\.jsonl, row 41: not JSON \(data\.bad_rows"
    ) as info:
        list(one)
    assert "\n" not in str(info.value)


def workers() -> list[int]:
    """Those that are forked: ranks of other tests are not."""
    forked = multiprocessing.get_context("fork").Process
    children = multiprocessing.active_children()
    return sorted(process.pid or 0 for process in children if isinstance(process, forked))


def draw_with_killed_workers(folder: Path, told: Path) -> None:
    batches = iter(loader(folder, num_workers=1))
    next(batches)
    for pid in workers():
        os.kill(pid, signal.SIGKILL)
    try:
        collections.deque(batches, maxlen=0)  # which have no end
    except RuntimeError as error:
        told.write_text(str(error))
    os._exit(0)  # PyTorch tells of the death once more while it ends its loader


def test_a_killed_process_is_an_error(tmp_path: Path) -> None:
    many_files(tmp_path)
    told = tmp_path.parent / f"{tmp_path.name}.told"
    context = multiprocessing.get_context("fork")
    # Apart: PyTorch's handler of SIGCHLD would tell later tests of the death.
    process = context.Process(target=draw_with_killed_workers, args=(tmp_path, told))
    process.start()
    process.join()
    assert re.search(r"worker .*(killed|exited)", told.read_text())


@pytest.mark.parametrize("name", ["TERM", "INT"])
def test_a_signal_to_all_processes_leaves_the_data_to_training(name: str, tmp_path: Path) -> None:
    many_files(tmp_path)
    before = workers()  # of loaders that are not collected yet
    batches = iter(loader(tmp_path, num_workers=2))
    next(batches)
    pids = sorted({*workers()} - {*before})
    assert len(pids) == 2
    # From elsewhere, as a scheduler would send it: the loader ends its processes by SIGTERM.
    subprocess.run(["kill", f"-{name}", *map(str, pids)], check=True)
    for _ in range(30):  # far more than is read ahead
        next(batches)
    assert {*pids} <= {*workers()}


def test_a_wait_for_data_ends_before_ranks_stop_waiting(tmp_path: Path) -> None:
    many_files(tmp_path)
    one = loader(tmp_path, num_workers=1)
    limits = dataclasses.replace(one._depth, start_seconds=0.5, seconds=0.25)
    one._depth = limits
    with (
        hanging(after=0),
        pytest.raises(files.DataError, match=r"waited .* comm\.init_timeout_seconds"),
    ):
        next(iter(one))
    one._depth = dataclasses.replace(limits, start_seconds=0)
    # In the second blocks.
    with (
        hanging(130),
        pytest.raises(files.DataError, match=r"waited .* comm\.train_timeout_seconds"),
    ):
        collections.deque(one, maxlen=0)


@contextlib.contextmanager
def hanging(after: int, marker: Path | None = None) -> Iterator[None]:
    """Have what reads files hang for an hour after that many rows."""
    read_rows, num_read = rows.read_rows, itertools.count()

    def slow(*args: Any) -> Iterator[Any]:
        for row in read_rows(*args):
            if next(num_read) == after:
                if marker is not None:
                    marker.write_text(str(os.getpid()))
                time.sleep(3600)
            yield row

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "read_rows", slow)
        yield


def until(condition: Callable[[], bool]) -> None:
    """Wait for what must come; a limit ends a test that would hang."""
    for _ in range(1200):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("waited for a minute")


def train_until_killed(folder: Path, states: Path, marker: Path) -> None:
    """Draw batches and note the state after each; the reader hangs in the second blocks."""
    with hanging(after=130, marker=marker), states.open("a") as file:
        one = loader(folder, num_workers=1)
        for _, labels in one:
            file.write(json.dumps([labels.tolist(), one.state_dict()]) + "\n")
            file.flush()


def test_a_kill_in_a_refill_loses_no_document(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    small_corpus(corpus)
    states, marker = tmp_path / "states", tmp_path / "marker"
    context = multiprocessing.get_context("fork")
    process = context.Process(target=train_until_killed, args=(corpus, states, marker))
    process.start()
    try:
        until(lambda: marker.exists() and states.read_text().count("\n") >= 2)
        worker = int(marker.read_text())
        process.kill()
        process.join()
        until(lambda: not is_alive(worker))  # it hangs for an hour, and holds what training held
    finally:
        process.kill()
    lines = [json.loads(line) for line in states.read_text().splitlines()]
    drawn, (_, saved) = [sorted(batch) for batch, _ in lines], lines[-1]
    expected, final = batches(corpus, 1, len(drawn) + 8, num_workers=0)
    assert drawn == expected[: len(drawn)]
    assert batches(corpus, 4, 8, saved, num_workers=1) == (expected[len(drawn) :], final)


def is_alive(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False
