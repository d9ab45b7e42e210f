"""Streams over files: each document once an epoch, whatever the ranks and restarts."""

from __future__ import annotations

import functools
import itertools
import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.data_corpus import build, dataset, write_jsonl, write_parquet
from torchtitan_ext.data.buffered import BufferedStream
from torchtitan_ext.data.files import Files, find_files
from torchtitan_ext.data.loader import Streams
from torchtitan_ext.data.streams import PackedDocuments, ShuffledOrder, Stream
from torchtitan_ext.data.tokenizers import ByteTokenizer

NUM_DOCUMENTS = 50_000
NUM_STREAMS = 96
LENGTH = 50


class Numbers:
    """A corpus whose text ``i`` is the number ``i``."""

    def __len__(self) -> int:
        return NUM_DOCUMENTS

    def text(self, index: int) -> str:
        return str(index)

    def digest(self) -> str:
        return "numbers"


class Recorder:
    """A tokenizer of one token a document and the end token, which notes what it was given.

    Documents are thereby counted as they go into the packer, with the epoch of their stream.
    """

    def __init__(self, seen: Counter[tuple[int, int]]) -> None:
        self.seen = seen
        self.stream: PackedDocuments | None = None
        self.pause = False

    def encode(self, text: str, add_bos: bool, add_eos: bool) -> list[int]:
        assert add_eos
        assert not add_bos
        if not self.pause:
            assert self.stream is not None
            self.seen[self.stream.epoch, int(text)] += 1
        return [int(text), -1]


@functools.cache
def corpus(num_files: int) -> Files:
    """50,000 documents in files of unequal length."""
    folder = Path(tempfile.mkdtemp())
    # Lengths from a few documents to many times as many.
    cuts = [NUM_DOCUMENTS * i * (i + 1) // num_files // (num_files + 1) for i in range(num_files)]
    cuts.append(NUM_DOCUMENTS)
    for start, stop in itertools.pairwise(cuts):
        write_jsonl(folder / f"{start}.jsonl", [{"text": str(i)} for i in range(start, stop)])
    return find_files(str(folder))


ORDER = ShuffledOrder(NUM_DOCUMENTS, seed=42)


def indexed_stream(tokenizer: Any, number: int) -> PackedDocuments:
    return Stream(
        Numbers(), ORDER, tokenizer, number=number, num_streams=NUM_STREAMS, length=LENGTH
    )


def buffered_stream(tokenizer: Any, number: int, num_files: int) -> PackedDocuments:
    options = {"number": number, "num_streams": NUM_STREAMS, "length": LENGTH}
    return BufferedStream(corpus(num_files), tokenizer, shuffle_buffer=40, **options)


MAKES = {
    "indexed": indexed_stream,
    "few files": functools.partial(buffered_stream, num_files=9),
    "many files": functools.partial(buffered_stream, num_files=250),
}


def ranks(make: Any, world: int, seen: Counter[tuple[int, int]], saved: dict[str, str]) -> Any:
    """The streams of each rank, at the positions of a checkpoint."""
    dealt = []
    for rank in range(world):
        dealt.append([])
        for number in range(rank, NUM_STREAMS, world):
            recorder = Recorder(seen)
            recorder.stream = make(recorder, number)
            if saved:
                recorder.pause = True  # what is read again was counted before the restart
                recorder.stream.load_state(saved[f"stream_{number}"])
                recorder.pause = False
            dealt[-1].append(recorder.stream)
    return [Streams(streams, NUM_STREAMS // world, {}) for streams in dealt]


def run_epoch(make: Any, worlds: Sequence[tuple[int, int]]) -> Counter[int]:
    """How often each document of the first epoch is seen.

    Args:
        make: Makes a stream.
        worlds: Numbers of ranks and of global batches to draw; the last goes on to the end.
    """
    seen: Counter[tuple[int, int]] = Counter()
    saved: dict[str, str] = {}
    for turn, (world, num_batches) in enumerate(worlds):
        loaders = ranks(make, world, seen, saved)
        last = turn == len(worlds) - 1
        iterators = [iter(one) for one in loaders]
        for _ in itertools.count() if last else range(num_batches):
            for iterator in iterators:
                next(iterator)
            if min(stream.epoch for one in loaders for stream in one._streams) >= 1:
                break
        saved = {key: value for one in loaders for key, value in one.state_dict().items()}
    return Counter({doc: count for (epoch, doc), count in seen.items() if epoch == 0})


WORLDS = st.lists(
    st.tuples(st.sampled_from([1, 2, 3, 6, 8, 16, 32, 48, 96]), st.integers(0, 9)),
    min_size=1,
    max_size=4,
)
EVERY_DOCUMENT_ONCE = Counter(range(NUM_DOCUMENTS))


# Few examples: each reads the whole corpus; together they pay for what one run costs in seconds.
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@settings(max_examples=3, deadline=None)
@given(worlds=WORLDS)
def test_each_document_of_an_epoch_is_seen_once(make: Any, worlds: list[tuple[int, int]]) -> None:
    assert run_epoch(make, worlds) == EVERY_DOCUMENT_ONCE


# ------------------------------------------------------------------ order and position


def small_corpus(folder: Path) -> Files:
    texts = ["x" * (1 + 7 * i % 23) + str(i) for i in range(60)]
    write_jsonl(folder / "a.jsonl", [{"text": t} for t in texts[:25]] + [{"text": ""}] * 4)
    write_parquet(folder / "b.parquet", [{"text": t} for t in texts[25:]])
    with (folder / "a.jsonl").open("ab") as file:
        file.write(b'{"text": 3}\n')
    return find_files(str(folder))


def small_stream(files: Files, number: int = 0, **options: Any) -> BufferedStream:
    defaults = {"num_streams": 3, "length": 16, "shuffle_buffer": 6, "bad_rows": "skip"}
    return BufferedStream(files, ByteTokenizer(), number=number, **{**defaults, **options})


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_stream_resumes_at_any_sequence_with_the_same_ones(number: int, tmp_path: Path) -> None:
    files = small_corpus(tmp_path)
    stream = small_stream(files, number)
    states, drawn = [stream.state()], []
    while stream.epoch < 2 or len(drawn) < 60:
        drawn.append(next(stream))
        states.append(stream.state())
    final = stream.skipped
    assert sum(final.values()) >= 10 * (number == 2)  # the last of the three ranges
    for stop in range(0, len(drawn), 3):
        resumed = small_stream(files, number)
        resumed.load_state(states[stop])
        assert resumed.state() == states[stop]
        assert [next(resumed) for _ in drawn[stop:]] == drawn[stop:]
        assert resumed.skipped == final


def test_the_shuffle_mixes_within_blocks_and_changes_with_seed_and_epoch(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": chr(65 + i)} for i in range(24)])
    files = find_files(str(tmp_path))

    def epochs(**options: Any) -> list[str]:
        stream = small_stream(files, num_streams=1, length=2, **options)
        letters = "".join(chr(next(stream)[0]) for _ in range(48))
        return [letters[:24], letters[24:]]

    plain = "".join(chr(65 + i) for i in range(24))
    assert epochs(shuffle_buffer=1) == [plain, plain]
    first, second = epochs(shuffle_buffer=8)
    assert first != second
    for epoch in (first, second):
        blocks = [sorted(epoch[i : i + 8]) for i in (0, 8, 16)]
        assert ["".join(block) for block in blocks] == [plain[:8], plain[8:16], plain[16:]]
        assert epoch != plain
    assert epochs(shuffle_buffer=8) == [first, second]
    assert epochs(shuffle_buffer=8, seed=43)[0] != first


@pytest.mark.parametrize(
    "change",
    [{"index": 7}, {"index": 0}, {"leftover": 99}, {"place": 1}],
)
def test_an_impossible_position_is_refused_and_changes_nothing(
    change: dict[str, int], tmp_path: Path
) -> None:
    stream = small_stream(small_corpus(tmp_path))
    next(stream)
    before = stream.state()
    position = json.loads(before)
    assert position["leftover"] > 0
    with pytest.raises(ValueError, match="stream_0: found"):
        stream.load_state(json.dumps({**position, **change}))
    assert stream.state() == before
    assert small_stream(small_corpus(tmp_path)).state() != before


def test_a_finite_stream_ends_with_its_files(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": "abc"}] * 5)
    stream = small_stream(find_files(str(tmp_path)), num_streams=1, length=8, infinite=False)
    assert len([next(stream) for _ in range(2)]) == 2  # 20 tokens
    with pytest.raises(StopIteration):
        next(stream)


def test_a_stream_without_a_sequence_is_an_error(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": "ab"}, {"text": ""}])
    with pytest.raises(ValueError, match=r"stream 0 holds fewer than 16 tokens"):
        next(small_stream(find_files(str(tmp_path)), num_streams=1))


# ------------------------------------------------------------------ from a config


def test_a_config_builds_streams_that_move_to_another_world(tmp_path: Path) -> None:
    small_corpus(tmp_path)

    def batches(world: int, num: int, saved: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        config = dataset(tmp_path, "documents", bad_rows="skip")
        loaders = [build(config, world, r, batch=4 // world) for r in range(world)]
        for one in loaders:
            one.load_state_dict(saved)
        iterators = [iter(one) for one in loaders]
        found = [
            sorted(row for it in iterators for row in next(it)[1].tolist()) for _ in range(num)
        ]
        return found, {k: v for one in loaders for k, v in one.state_dict().items()}

    expected, _ = batches(1, 9, {})
    first, saved = batches(4, 5, {})
    assert first + batches(2, 4, saved)[0] == expected
    write_jsonl(tmp_path / "c.jsonl", [{"text": "new"}])
    with pytest.raises(ValueError, match="documents: was"):
        batches(2, 1, saved)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("documents", {"order": "ascend"}, r"data\.order: found 'ascend', expected 'uniform'"),
        ("documents", {"shuffle_buffer": 0}, r"data\.shuffle_buffer: found 0"),
        ("documents", {"num_streams": 5}, r"data\.num_streams: found 5, expected a multiple"),
        ("pool", {"num_streams": 128}, r"expected at most the number of documents, 60"),
        ("documents", {"text_field": "body"}, r"row \d+: missing"),
    ],
)
def test_a_config_that_cannot_work_is_refused(
    name: str, fields: dict[str, Any], message: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    small_corpus(tmp_path)
    bad_rows = "error" if "text_field" in fields else "skip"
    config = dataset(tmp_path, name, **{"bad_rows": bad_rows, **fields})
    with pytest.raises(ValueError, match=message):
        next(iter(build(config, 2)))
