"""Tokenizers, documents, streams and batches."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchtitan.components.loss import IGNORE_INDEX

from tests.unit.data_corpus import build, dataset
from torchtitan_ext.data import streams
from torchtitan_ext.data.documents import TextFiles, standard_library, text_files
from torchtitan_ext.data.loader import Streams, document_positions
from torchtitan_ext.data.streams import ShuffledOrder, Stream
from torchtitan_ext.data.tokenizers import EOS, ByteTokenizer

TOKENIZER = ByteTokenizer()


class Texts:
    """Documents in memory; ``None`` stands for one that is left out."""

    def __init__(self, *texts: str | None) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def text(self, index: int) -> str | None:
        return self.texts[index]

    def digest(self) -> str:
        return "0"


def corpus(num_documents: int = 23) -> Texts:
    # Lengths from an empty document to one longer than several sequences.
    return Texts(*(chr(65 + i % 26) * (7 * i % 40) for i in range(num_documents)))


def loader(
    rank: int,
    world: int,
    texts: Any = None,
    *,
    num_streams: int = 4,
    batch: int = 4,
    infinite: bool = True,
) -> Any:
    documents = texts or corpus()
    order = ShuffledOrder(len(documents), seed=3)
    options = {"num_streams": num_streams, "length": 9, "infinite": infinite}
    mine = [
        Stream(documents, order, TOKENIZER, number=i, **options)
        for i in range(rank, num_streams, world)
    ]
    source = {"documents": documents.digest()}
    return Streams(mine, batch // world, source, infinite=infinite, fill=0 if infinite else 9)


def sequences(batch: Any) -> list[tuple[int, ...]]:
    inputs, labels = batch
    rows = torch.cat([inputs["input"], labels[:, -1:]], dim=1)
    assert torch.equal(rows[:, 1:], labels)
    return [tuple(row) for row in rows.tolist()]


def global_batches(loaders: list[Any], num: int) -> list[list[tuple[int, ...]]]:
    iterators = [iter(one) for one in loaders]
    return [sorted(row for it in iterators for row in sequences(next(it))) for _ in range(num)]


@given(st.text())
def test_byte_tokens_are_the_utf8_bytes(text: str) -> None:
    tokens = TOKENIZER.encode(text)
    assert tokens == list(text.encode())
    assert TOKENIZER.decode(tokens) == text


def test_the_end_token_comes_from_the_tokenizer_alone() -> None:
    assert TOKENIZER.encode("a", add_eos=True) == [97, TOKENIZER.eos_id]
    assert TOKENIZER.eos_id not in TOKENIZER.encode(f"a{EOS}b")
    assert max(TOKENIZER.encode(EOS, add_eos=True)) == TOKENIZER.get_vocab_size() - 1
    assert TOKENIZER.encode("a", add_bos=True, add_eos=True) == [97, TOKENIZER.eos_id]


def test_a_stream_packs_documents_with_end_tokens_and_drops_the_remainder() -> None:
    documents = Texts("aaaa", None, "", "bb")
    order = ShuffledOrder(4, seed=0)
    stream = Stream(documents, order, TOKENIZER, number=0, num_streams=1, length=3, infinite=False)
    packed = [
        token
        for i in order(0)
        if documents.texts[i] is not None
        for token in TOKENIZER.encode(documents.texts[i] or "", add_eos=True)
    ]
    assert len(packed) == 9  # 5 + 1 + 3: three whole sequences
    drawn = [next(stream) for _ in range(3)]
    assert [token for row in drawn for token in row] == packed
    with pytest.raises(StopIteration):
        next(stream)


def test_epochs_have_their_own_order_and_share_no_sequence() -> None:
    documents = Texts(*("abcdefgh"[i] * 4 for i in range(8)))
    stream = Stream(
        documents, ShuffledOrder(8, seed=1), TOKENIZER, number=0, num_streams=1, length=7
    )
    # 40 tokens an epoch: five sequences, and a remainder of five tokens that is dropped.
    epochs = [[next(stream) for _ in range(5)] for _ in range(2)]
    assert epochs[0] != epochs[1]
    for epoch in epochs:
        assert all(sum(row.count(byte) for row in epoch) <= 4 for byte in b"abcdefgh")


def test_an_order_is_computed_once_though_streams_stand_in_two_epochs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed: list[int] = []
    shuffle = streams._randperm

    def counted(size: int, seed: int) -> Sequence[int]:
        computed.append(seed)
        return shuffle(size, seed)

    monkeypatch.setattr(streams, "_randperm", counted)
    one = loader(0, 1)  # streams of unlike lengths
    global_batches([one], 40)
    epochs = {stream.epoch for stream in one._streams}
    assert len(epochs) == 2  # otherwise this test would show nothing
    assert len(computed) == len(set(computed)) == max(epochs) + 1


@pytest.mark.parametrize("world", [1, 2, 4])
def test_global_batches_do_not_depend_on_the_number_of_ranks(world: int) -> None:
    # Ten batches of four: more than an epoch of the shortest stream.
    expected = global_batches([loader(0, 1)], 10)
    assert global_batches([loader(r, world) for r in range(world)], 10) == expected


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_validation_counts_each_sequence_once_whatever_the_number_of_ranks(world: int) -> None:
    streams = loader(0, 1, infinite=False)._streams
    expected = sorted(tuple(row) for stream in streams for row in iter(stream.__next__, None))
    found = []
    for rank in range(world):
        for inputs, labels in loader(rank, world, batch=8, infinite=False):
            assert inputs["input"].shape == labels.shape == (8 // world, 8)
            counts = (labels != IGNORE_INDEX).all(dim=1)
            assert torch.equal(counts, (labels != IGNORE_INDEX).any(dim=1))
            found += sequences(({"input": inputs["input"][counts]}, labels[counts]))
    assert sorted(found) == expected
    assert len(expected) % 8  # otherwise no batch would be filled


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 4), (2, 2), (2, 1), (4, 2)])
@pytest.mark.parametrize("stop", [1, 3, 7])
def test_resume_goes_on_with_the_same_batches(before: int, after: int, stop: int) -> None:
    # Three rows a batch would not split over four ranks; twelve streams and batches of four leave
    # a turn over the streams unfinished at every stop.
    make = lambda rank, world: loader(rank, world, num_streams=12)  # noqa: E731
    expected = global_batches([make(0, 1)], 10)
    first = [make(rank, before) for rank in range(before)]
    assert global_batches(first, stop) == expected[:stop]
    saved = {key: value for one in first for key, value in one.state_dict().items()}
    second = [make(rank, after) for rank in range(after)]
    for one in second:
        assert one.state_dict().keys() <= saved.keys()  # what a distributed checkpoint looks up
        one.load_state_dict(saved)
    assert global_batches(second, 10 - stop) == expected[stop:]


@settings(max_examples=30, deadline=None)  # the first example pays for imports
@given(st.lists(st.text(max_size=30), min_size=1, max_size=9), st.integers(0, 12))
def test_a_position_restores_any_stream(texts: list[str], num_drawn: int) -> None:
    def make() -> Stream:
        order = ShuffledOrder(len(texts), seed=5)
        return Stream(Texts(*texts), order, TOKENIZER, number=0, num_streams=1, length=1)

    stream, copy = make(), make()
    for _ in range(num_drawn):
        next(stream)
    copy.load_state(stream.state())
    assert [next(copy) for _ in range(9)] == [next(stream) for _ in range(9)]


def test_state_of_another_source_or_stream_count_is_refused() -> None:
    one = loader(0, 1)
    state = one.state_dict()
    with pytest.raises(ValueError, match=r"documents: was '1', is '0'"):
        one.load_state_dict({**state, "source": '{"documents": "1"}'})
    del state["stream_2"]
    with pytest.raises(ValueError, match=r"lacks the positions of streams \[2\]"):
        one.load_state_dict(state)


@pytest.mark.parametrize(
    "state",
    [
        "{}x",
        '{"epoch": 0, "place": 1}',
        '{"epoch": 0, "index": 99, "leftover": 1, "num_sequences": 1}',
        '{"epoch": 0, "index": 1, "leftover": 10000, "num_sequences": 1}',
    ],
)
def test_an_impossible_position_is_refused_and_changes_nothing(state: str) -> None:
    stream = Stream(corpus(), ShuffledOrder(23, 3), TOKENIZER, number=1, num_streams=4, length=9)
    before = stream.state()
    with pytest.raises(ValueError, match="stream_1"):
        stream.load_state(state)
    assert stream.state() == before


def test_a_stream_without_a_sequence_is_an_error_not_an_endless_search() -> None:
    stream = Stream(Texts("ab"), ShuffledOrder(1, 0), TOKENIZER, number=0, num_streams=1, length=9)
    with pytest.raises(ValueError, match=r"data.num_streams: found 1, and stream 0 holds fewer"):
        next(stream)


def test_text_files_are_sorted_and_found_by_folder_file_and_glob(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.txt", "sub/c.txt", "d.md"):
        (tmp_path / name).write_text(name)
    folder = text_files(str(tmp_path), "**/*.txt")
    assert [folder.text(i) for i in range(len(folder))] == ["a.txt", "b.txt", "sub/c.txt"]
    by_glob = text_files(str(tmp_path / "**" / "*.txt"), "unused")
    assert by_glob.digest() == folder.digest()
    single = text_files(str(tmp_path / "d.md"), "unused")
    assert [len(single), single.text(0)] == [1, "d.md"]
    with pytest.raises(ValueError, match="no file matches"):
        text_files(str(tmp_path), "*.rst")
    with pytest.raises(ValueError, match="no such file or folder"):
        text_files(str(tmp_path / "nowhere"), "*")


def test_the_digest_follows_names_and_sizes_but_not_the_place(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text("text")
    one, two = (text_files(str(tmp_path / f), "*.txt").digest() for f in ("one", "two"))
    assert one == two
    (tmp_path / "two" / "a.txt").write_text("longer text")
    assert text_files(str(tmp_path / "two"), "*.txt").digest() != one


def test_a_file_that_is_not_utf8_is_named_or_skipped_and_counted(tmp_path: Path) -> None:
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"bad\.txt: not UTF-8.*data\.undecodable"):
        TextFiles([bad], tmp_path).text(0)
    skipping = TextFiles([bad], tmp_path, undecodable="skip")
    assert [skipping.text(0), skipping.num_skipped] == [None, 1]
    bad.unlink()
    with pytest.raises(ValueError, match=r"cannot read .*bad\.txt"):
        TextFiles([bad], tmp_path)


def test_the_standard_library_is_real_text() -> None:
    library = standard_library()
    # The smallest installations, without tests and idlelib, still have several hundred modules.
    assert len(library) > 300
    assert library.digest() == standard_library().digest()


@pytest.fixture
def eight(tmp_path: Path) -> Path:
    for i in range(8):
        (tmp_path / f"{i}.txt").write_text(str(i) * 50)
    return tmp_path


def test_a_config_deals_streams_to_ranks(eight: Path) -> None:
    ranks = [build(dataset(eight, "text"), 2, rank, batch=3, seq_len=6) for rank in range(2)]
    assert [sorted(one.state_dict()) for one in ranks] == [
        ["source", "stream_0", "stream_2"],
        ["source", "stream_1", "stream_3"],
    ]
    inputs, labels = next(iter(ranks[0]))
    assert inputs.keys() == {"input"}
    assert inputs["input"].shape == labels.shape == (3, 6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_streams": 5}, "data.num_streams: found 5, expected a multiple of"),
        ({"num_streams": 0}, "data.num_streams: found 0"),
        ({"num_streams": 10}, "expected at most the number of documents, 8"),
        ({"dataset_path": None}, r"training\.dataset_path: found none"),
        ({"num_workers": -1}, r"data\.num_workers: found -1, expected an integer >= 0"),
        ({"prefetch_factor": 0}, r"data\.prefetch_factor: found 0, expected an integer >= 1"),
    ],
)
def test_a_config_that_cannot_work_is_refused(
    eight: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build(dataclasses.replace(dataset(eight, "text"), **change), 2)


@pytest.mark.parametrize("world", [1, 2])
def test_finite_streams_are_read_to_their_end(world: int, eight: Path) -> None:
    # Four streams of two documents: 102 tokens, or eleven sequences of nine.
    config = dataset(eight, "text", infinite=False)
    loaders = [build(config, world, rank, batch=3) for rank in range(world)]
    counts = [len(list(one)) for one in loaders]
    assert counts == [44 // world // 3] * world


def test_documents_that_do_not_see_each_other_have_places_of_their_own(eight: Path) -> None:
    config = dataset(eight, "text", positions=True, num_streams=1)
    batches = iter(build(config, batch=1, seq_len=30))
    eos = TOKENIZER.eos_id
    rows, places, labels = [], [], []
    for inputs, expected in itertools.islice(batches, 10):
        rows += inputs["input"].tolist()
        places += inputs["positions"].tolist()
        labels += expected.tolist()
    # Documents of 51 tokens in sequences of 31, of which the model sees 30.
    assert places[0] == list(range(30))
    assert places[1] == [*range(20), *range(10)]
    for row, place, label in zip(rows, places, labels, strict=True):
        starts = [0, *(i + 1 for i in range(29) if row[i] == eos)]
        assert [i for i, one in enumerate(place) if one == 0] == starts
        assert [i for i, one in enumerate(label) if one == IGNORE_INDEX] == [
            i for i, token in enumerate(row) if token == eos
        ]


@given(st.lists(st.lists(st.integers(0, 2), min_size=7, max_size=7), min_size=1, max_size=3))
def test_positions_count_from_the_last_end_token(rows: list[list[int]]) -> None:
    expected = []
    for row in rows:
        places, place = [], 0
        for token in row:
            places.append(place)
            place = 0 if token == 1 else place + 1
        expected.append(places)
    assert document_positions(torch.tensor(rows), eos_id=1).tolist() == expected
