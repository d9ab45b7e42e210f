"""Batches of packed tokens: the same sequences on any number of ranks, in one order."""

from __future__ import annotations

import dataclasses
import itertools
import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchtitan.components.loss import IGNORE_INDEX

from tests.titan.data_corpus import build, dataset, write_texts
from torchtitan_ext.data import pack
from torchtitan_ext.data.loader import ValidationLoader, document_positions, tokenized
from torchtitan_ext.data.order import CYCLE, Mixture, shuffled
from torchtitan_ext.data.tokenizers import ByteTokenizer

TOKENIZER = ByteTokenizer()
RECORDED = [368453284, 124301446, 712196683]
TEXTS = [chr(65 + i % 26) * (1 + 7 * i % 40) for i in range(23)]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_texts(tmp_path / "corpus", TEXTS)


def sequences(batch: Any) -> list[tuple[int, ...]]:
    inputs, labels = batch
    rows = torch.cat([inputs["input"], labels[:, -1:]], dim=1)
    assert inputs["input"].dtype == labels.dtype == torch.int64
    assert torch.equal(rows[:, 1:], labels)
    return [tuple(row) for row in rows.tolist()]


def loaders(path: Path | str, world: int, saved: Any = None, **fields: Any) -> list[Any]:
    """Loaders of all ranks: four sequences of eight tokens a batch."""
    made = [build(dataset(path, **fields), world, r, batch=4 // world) for r in range(world)]
    for one in made:
        one.load_state_dict(saved or {})
    return made


def global_batches(made: list[Any], num: int) -> list[list[tuple[int, ...]]]:
    iterators = [iter(one) for one in made]
    return [[row for it in iterators for row in sequences(next(it))] for _ in range(num)]


@given(st.text())
def test_byte_tokens_are_the_utf8_bytes(text: str) -> None:
    tokens = TOKENIZER.encode(text)
    assert tokens == list(text.encode())
    assert TOKENIZER.decode(tokens) == text


# ------------------------------------------------------------------ orders


@given(st.integers(1, 300), st.integers(0, 2**62), st.integers(0, 99))
def test_a_shuffle_has_every_number_once(size: int, seed: int, epoch: int) -> None:
    order = [shuffled(place, size, seed, epoch) for place in range(size)]
    assert sorted(order) == list(range(size))


def test_a_shuffle_is_the_same_everywhere_and_prefers_no_number() -> None:
    # Written down: a position in a checkpoint means this order, on every machine and version.
    assert [shuffled(place, 10**9, 42, 0, 0) for place in range(3)] == RECORDED
    counts = Counter((place, shuffled(place, 7, seed)) for seed in range(700) for place in range(7))
    # Of 100 expected: five standard deviations, of the 49 pairs together.
    chi_squared = sum((counts[place, n] - 100) ** 2 / 100 for place in range(7) for n in range(7))
    assert len(counts) == 49
    assert chi_squared < 36 + 5 * (2 * 36) ** 0.5  # 36 degrees of freedom


@settings(max_examples=10)
@given(st.lists(st.floats(0.01, 1), min_size=2, max_size=5), st.integers(0, 99))
def test_a_mixture_draws_what_the_weights_say_and_leaves_out_nothing(
    weights: list[float], seed: int
) -> None:
    mixture = Mixture(weights, seed)
    drawn = [mixture(number) for number in range(2 * CYCLE)]
    assert len(set(drawn)) == 2 * CYCLE
    for source, weight in enumerate(weights):
        mine = sorted(place for one, place in drawn if one == source)
        assert mine == list(range(len(mine)))
        assert abs(len(mine) / 2 - CYCLE * weight / sum(weights)) < 1
    with pytest.raises(ValueError, match=r"expected each to be at least 0\.001 of"):
        Mixture([1.0, 0.0001], seed)


# ------------------------------------------------------------------ ranks


@pytest.mark.parametrize("world", [1, 2, 4])
def test_global_batches_do_not_depend_on_the_number_of_ranks(world: int, corpus: Path) -> None:
    # 497 tokens are 62 sequences: in the sixteenth batch a second epoch begins.
    expected = global_batches(loaders(corpus, 1), 18)
    assert global_batches(loaders(corpus, world), 18) == expected
    drawn = [row for batch in expected for row in batch]
    epoch = drawn[:62]
    tokens = [t for text in TEXTS for t in TOKENIZER.encode(text, add_eos=True)]
    in_order = [tuple(tokens[i : i + 9]) for i in range(0, 496, 8)]
    assert sorted(epoch) == sorted(in_order)  # each once, with its label
    assert epoch != in_order
    assert drawn[62:] != epoch[:10]


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 4), (2, 4), (2, 1), (4, 2)])
def test_resume_goes_on_with_the_same_batches(before: int, after: int, corpus: Path) -> None:
    expected = global_batches(loaders(corpus, 1), 20)
    first = loaders(corpus, before)
    assert global_batches(first, 7) == expected[:7]
    # Every rank saves the same: a checkpoint keeps one.
    (saved,) = {json.dumps(one.state_dict()) for one in first}
    assert json.loads(saved)["sequence"] == 28
    assert global_batches(loaders(corpus, after, json.loads(saved)), 13) == expected[7:]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_validation_counts_each_sequence_once_whatever_the_number_of_ranks(
    world: int, corpus: Path
) -> None:
    config = ValidationLoader.Config(**dataclasses.asdict(dataset(corpus, infinite=False)))
    expected = [row for batch in global_batches(loaders(corpus, 1), 16) for row in batch][:62]
    found = []
    for rank in range(world):
        batches = list(build(config, world, rank, batch=8 // world))
        assert len(batches) == 8  # two sequences of the last one do not count
        for inputs, labels in batches:
            assert inputs["input"].shape == labels.shape == (8 // world, 8)
            counts = (labels != IGNORE_INDEX).all(dim=1)
            assert torch.equal(counts, (labels != IGNORE_INDEX).any(dim=1))
            found += sequences(({"input": inputs["input"][counts]}, labels[counts]))
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("world", [1, 2])
def test_finite_training_data_ends_with_the_last_whole_batch(world: int, corpus: Path) -> None:
    config = dataset(corpus, infinite=False)
    ranks = [build(config, world, rank, batch=7) for rank in range(world)]
    assert [len(list(one)) for one in ranks] == [62 // (7 * world)] * world


def test_a_mixture_reads_its_folders_by_their_weights(tmp_path: Path) -> None:
    for letter in "ab":
        write_texts(tmp_path / letter, [letter * 200])
    where = f"{tmp_path / 'a'}=3, {tmp_path / 'b'}=1"
    batches = global_batches(loaders(where, 2), CYCLE // 4)
    assert Counter(chr(row[0]) for b in batches for row in b if row[0] < 256) == pytest.approx(
        {"a": 750, "b": 250}, abs=40
    )
    assert batches == global_batches(loaders(where, 4), CYCLE // 4)
    with pytest.raises(ValueError, match="a mixture has no end"):
        build(dataset(where, infinite=False))
    with pytest.raises(ValueError, match=r"found 'b', expected such as data/web=0\.7"):
        build(dataset("a=1,b"))


def test_a_position_in_other_data_is_refused(corpus: Path) -> None:
    (one,) = loaders(corpus, 1)
    state = one.state_dict()
    for change in (
        {"seed": 2},
        {"dataset_path": str(write_texts(corpus.parent / "b", ["c" * 99]))},
    ):
        (other,) = loaders(corpus, 1, **change)
        with pytest.raises(ValueError, match=r"(seed|tokens): was .*exclude_from_loading"):
            other.load_state_dict(state)
    with pytest.raises(ValueError, match="found offset in the checkpoint, expected sequence and s"):
        one.load_state_dict({"offset": 3})


def test_another_tokenizer_is_refused(corpus: Path) -> None:
    folder = tokenized(dataset(corpus), str(corpus), TOKENIZER)
    index = json.loads((folder / "index.json").read_text())
    index["settings"]["tokenizer"] = "Other-3"
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"tokenizer\.kind: found ByteTokenizer.*expected Other-3"):
        build(dataset(folder, "packed"))


# ------------------------------------------------------------------ before training


def test_text_is_tokenized_once(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataset(corpus)
    expected = global_batches([build(config)], 3)

    def again(*_: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(pack, "_encode", again)
    assert global_batches([build(config)], 3) == expected
    (corpus / "000.txt").write_text("something else")
    with pytest.raises(AssertionError):
        build(config)


def test_other_ranks_wait_for_the_first_and_not_for_ever(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    config = dataset(corpus, tokenize_timeout_seconds=0.3)
    with pytest.raises(
        ValueError, match=r"dataloader\.tokenize_timeout_seconds: found 0\.3, and the first"
    ):
        build(config)
    assert not Path(config.tokens).exists()
    config.tokenize_timeout_seconds = 60.0
    with monkeypatch.context() as first:
        first.setattr("torch.distributed.get_rank", lambda: 0)
        expected = tokenized(config, str(corpus), TOKENIZER)
    index = expected / "index.json"
    index.rename(expected / "later")
    threading.Timer(0.5, lambda: (expected / "later").rename(index)).start()
    assert tokenized(config, str(corpus), TOKENIZER) == expected


# ------------------------------------------------------------------ documents


def test_documents_that_do_not_see_each_other_have_places_of_their_own(tmp_path: Path) -> None:
    eight = write_texts(tmp_path / "eight", [str(i) * 50 for i in range(8)])
    batches = iter(build(dataset(eight, positions=True), batch=1, seq_len=30))
    eos = TOKENIZER.eos_id
    starts_in_batch = 0
    for inputs, expected in itertools.islice(batches, 10):
        (row,), (place,), (label,) = (
            one.tolist() for one in (inputs["input"], inputs["positions"], expected)
        )
        starts = [0, *(i + 1 for i in range(29) if row[i] == eos)]
        starts_in_batch += len(starts) - 1
        assert [i for i, one in enumerate(place) if one == 0] == starts
        assert [i for i, one in enumerate(label) if one == IGNORE_INDEX] == [
            i for i, token in enumerate(row) if token == eos
        ]
    assert starts_in_batch > 3


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
