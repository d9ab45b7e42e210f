"""Batches of packed tokens: the same sequences on any number of ranks, in one order."""

from __future__ import annotations

import dataclasses
import itertools
import json
import resource
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchtitan.components.loss import IGNORE_INDEX

from tests.titan.data_corpus import build, packed, write_packed
from torchtitan_ext.data.loader import BATCHES_AHEAD, PackedLoader, ValidationLoader
from torchtitan_ext.data.order import CYCLE, Mixture, shuffled
from torchtitan_ext.data.tokenizers import ByteTokenizer

EOS = ByteTokenizer().eos_id
RECORDED = [368453284, 124301446, 712196683]
TEXTS = [chr(65 + i % 26) * (1 + 7 * i % 40) for i in range(23)]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_packed(tmp_path / "corpus", [TEXTS[:9], [], TEXTS[9:10], TEXTS[10:]])


def sequences(batch: Any) -> list[tuple[int, ...]]:
    inputs, labels = batch
    rows = torch.cat([inputs["input"], labels[:, -1:]], dim=1)
    assert inputs["input"].dtype == labels.dtype == torch.int64
    assert torch.equal(rows[:, 1:], labels)
    return [tuple(row) for row in rows.tolist()]


def loaders(path: Path | str, world: int, saved: Any = None, **fields: Any) -> list[Any]:
    """Loaders of all ranks: four sequences of eight tokens a batch."""
    made = [build(packed(path, **fields), world, r, batch=4 // world) for r in range(world)]
    for one in made:
        one.load_state_dict(saved or {})
    return made


def global_batches(made: list[Any], num: int) -> list[list[tuple[int, ...]]]:
    iterators = [iter(one) for one in made]
    return [[row for it in iterators for row in sequences(next(it))] for _ in range(num)]


# ------------------------------------------------------------------ orders


@given(st.integers(1, 300), st.integers(0, 2**62), st.integers(0, 99))
def test_a_shuffle_has_every_number_once(size: int, seed: int, epoch: int) -> None:
    order = [shuffled(place, size, seed, epoch) for place in range(size)]
    assert sorted(order) == list(range(size))


def test_a_shuffle_is_the_same_everywhere_and_prefers_no_number() -> None:
    # Written down: a position in a checkpoint means this order, on every machine and version.
    assert [shuffled(place, 10**9, 42, 0, 0) for place in range(3)] == RECORDED
    assert [shuffled(place, 16, 42, 0, 0) for place in range(4)] == [0, 5, 14, 4]  # all of 4 bits
    counts = Counter((place, shuffled(place, 7, seed)) for seed in range(700) for place in range(7))
    # Of 100 expected: five standard deviations, of the 49 pairs together.
    chi_squared = sum((counts[place, n] - 100) ** 2 / 100 for place in range(7) for n in range(7))
    assert len(counts) == 49
    assert chi_squared < 36 + 5 * (2 * 36) ** 0.5  # 36 degrees of freedom


@settings(max_examples=10)
@given(st.lists(st.floats(0.01, 1), min_size=2, max_size=5), st.integers(0, 99))
def test_a_mixture_draws_by_weights_and_leaves_out_nothing(weights: list[float], seed: int) -> None:
    mixture = Mixture(weights, seed)
    drawn = [mixture(number) for number in range(2 * CYCLE)]
    assert len(set(drawn)) == 2 * CYCLE
    for source, weight in enumerate(weights):
        mine = sorted(place for one, place in drawn if one == source)
        assert mine == list(range(len(mine)))
        assert abs(len(mine) / 2 - CYCLE * weight / sum(weights)) < 1


# ------------------------------------------------------------------ ranks


def test_an_epoch_has_every_sequence_once(corpus: Path) -> None:
    # 497 tokens are 62 sequences: in the sixteenth batch a second epoch begins.
    drawn = [row for batch in global_batches(loaders(corpus, 1), 18) for row in batch]
    epoch = drawn[:62]
    tokens = [t for text in TEXTS for t in ByteTokenizer().encode(text, add_eos=True)]
    in_order = [tuple(tokens[i : i + 9]) for i in range(0, 496, 8)]
    assert sorted(epoch) == sorted(in_order)  # each once, with its label
    assert epoch != in_order
    assert drawn[62:] != epoch[:10]


def test_the_last_token_begins_no_sequence(tmp_path: Path) -> None:
    path = write_packed(tmp_path / "corpus", [["a" * 15]])  # 16 tokens: none follows the last
    assert set(global_batches(loaders(path, 1), 1)[0]) == {(97,) * 9}


@pytest.mark.parametrize(("before", "after"), [(1, 4), (2, 4), (4, 2)])
def test_any_number_of_ranks_has_the_same_batches(before: int, after: int, corpus: Path) -> None:
    expected = global_batches(loaders(corpus, 1), 20)
    first = loaders(corpus, before)
    assert global_batches(first, 7) == expected[:7]
    # Every rank saves the same: a checkpoint keeps one.
    (saved,) = {json.dumps(one.state_dict()) for one in first}
    assert json.loads(saved)["sequence"] == 28
    assert global_batches(loaders(corpus, after, json.loads(saved)), 13) == expected[7:]


@pytest.mark.parametrize("order", ["uniform", "descend"])
def test_shards_may_be_more_than_files_that_a_process_may_open(order: str, tmp_path: Path) -> None:
    texts = [[f"{shard:05}"] * 3 for shard in range(1490)]
    path = write_packed(tmp_path / "corpus", texts, [[0.0] * 3] * 1490)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        (one,) = loaders(path, 1, order=order)
        batches = global_batches([one], 800)  # 3,352 sequences are an epoch
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len({row for batch in batches for row in batch}) > 3000


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_validation_counts_each_sequence_once(world: int, corpus: Path) -> None:
    config = ValidationLoader.Config(**dataclasses.asdict(packed(corpus, infinite=False)))
    expected = [row for batch in global_batches(loaders(corpus, 1), 16) for row in batch][:62]
    counted = []
    for rank in range(world):
        batches = list(build(config, world, rank, batch=8 // world))
        assert len(batches) == 8  # two sequences of the last one do not count
        for inputs, labels in batches:
            assert inputs["input"].shape == labels.shape == (8 // world, 8)
            counts = (labels != IGNORE_INDEX).all(dim=1)
            assert torch.equal(counts, (labels != IGNORE_INDEX).any(dim=1))
            counted += sequences(({"input": inputs["input"][counts]}, labels[counts]))
    assert sorted(counted) == sorted(expected)


def test_a_folder_may_be_named_as_a_weight_is(tmp_path: Path) -> None:
    path = write_packed(tmp_path / "lang=1", [["a" * 200]])
    assert set(global_batches(loaders(path, 1), 1)[0][0]) <= {97, EOS}


def test_a_position_of_other_data_is_refused(corpus: Path) -> None:
    (one,) = loaders(corpus, 1)
    for state in (loaders(corpus, 1, seed=2)[0].state_dict(), {"offset": 3}):
        with pytest.raises(ValueError, match=r"^dataloader: .*exclude_from_loading"):
            one.load_state_dict(state)


def numbered(folder: Path, letter: str) -> Path:
    """A corpus of some 2000 sequences of eight tokens, each another one."""
    numbers = range(2000 + ord(letter))  # corpora are told apart by their documents' lengths
    return write_packed(folder / letter, [[f"{letter}{number:06}" for number in numbers]])


def test_a_changed_mixture_goes_on_with_each_corpus_where_it_was(tmp_path: Path) -> None:
    """Over 1, 2 and 4 ranks, resumed before, at and after each change; one corpus comes back."""
    for letter in "abc":
        numbered(tmp_path, letter)
    mixtures = [
        {"a": 0.7, "b": 0.3},
        {"c": 0.2, "b": 0.3, "a": 0.5},
        {"c": 1},
        {"b": 0.5, "a": 0.5},
    ]
    saved: Any = None
    alike: list[tuple[int, ...]] = []
    drawn: dict[str, list[tuple[int, ...]]] = {letter: [] for letter in "abc"}
    for weights, stays in ((mixture, stays) for mixture in mixtures for stays in (False, True)):
        # The weight of a single folder is none.
        where = ",".join(f"{tmp_path / letter}={weight}" for letter, weight in weights.items())
        where = str(tmp_path / "c") if len(weights) == 1 else where
        rule = "error" if stays else "use_config"
        states = []
        for world in (1, 2, 4):
            made = loaders(where, world, saved, on_mixture_change=rule)
            batches = global_batches(made, 65)
            states.append([one.state_dict() for one in made])
            assert {str(state) for state in states[-1]} == {str(states[0][0])}
            rows = [row for batch in batches for row in batch]
            alike = rows if world == 1 else alike
            assert rows == alike
        saved = states[0][0]
        counts = Counter(chr(row[0]) for row in rows)
        total = sum(weights.values())
        # 260 sequences, at slots that are drawn of a cycle of 1000: five standard deviations.
        expected = {letter: 260 * weight / total for letter, weight in weights.items()}
        assert counts == pytest.approx(expected, abs=5 * 260**0.5 / 2)
        for row in rows:
            drawn[chr(row[0])].append(row)
    # None is left out: the places of a corpus that were read are those before the first unread one,
    # without those that wait for their turn.
    (last,) = loaders(tmp_path / "c", 1, saved, on_mixture_change="use_config")
    source = json.loads(last.state_dict()["source"])
    read = [place - len(source["left"][name]) for name, place in source["unread"].items()]
    assert sorted(read) == sorted(map(len, drawn.values()))
    for letter, rows in drawn.items():
        assert len(rows) > 400
        assert len({*rows}) == len(rows), letter  # none twice, within its first epoch


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({}, True),
        ({"on_mixture_change": "use_config", "seed": 2}, False),
        ({"on_mixture_change": "use_config", "order": "ascend"}, False),
    ],
)
def test_another_mixture_is_refused_with_its_remedy(
    change: dict[str, Any], remedy: bool, tmp_path: Path
) -> None:
    for letter in "ab":
        write_packed(tmp_path / letter, [[letter * 900]], [[1.0]])
    saved = loaders(f"{tmp_path}/a=7,{tmp_path}/b=3", 1)[0].state_dict()
    for other in (f"{tmp_path}/a=5,{tmp_path}/b=5", f"{tmp_path}/b=3,{tmp_path}/a=7"):
        with pytest.raises(ValueError, match=r"^dataloader: .* tokens: was|tokens: was") as error:
            loaders(other, 1, saved, **change)
        assert ("dataloader.on_mixture_change = 'use_config'" in str(error.value)) == remedy


def test_a_checkpoint_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    """It holds no counts: its mixture has been the same from its first sequence on."""
    for letter in "ab":
        numbered(tmp_path, letter)
    where = f"{tmp_path}/a=7,{tmp_path}/b=3"
    made = loaders(where, 1)
    expected = global_batches(made, 20)
    source = json.loads(made[0].state_dict()["source"])
    old = {name: source[name] for name in ("tokens", "seq_len", "seed", "order")}
    saved = {"sequence": 40, "source": json.dumps(old, sort_keys=True)}
    assert global_batches(loaders(where, 2, saved), 10) == expected[10:]
    other = f"{tmp_path}/b=3,{tmp_path}/a=3"
    after = global_batches(loaders(other, 2, saved, on_mixture_change="use_config"), 100)
    before = {row for batch in expected[:10] for row in batch}
    assert not before & {row for batch in after for row in batch}


# ------------------------------------------------------------------ read ahead


def test_the_position_is_that_of_the_step_and_not_of_the_thread(corpus: Path) -> None:
    stock = PackedLoader._tokens
    with mock.patch.object(PackedLoader, "_tokens", autospec=True, side_effect=stock) as tokens:
        one = build(packed(corpus))
        batches = iter(one)
        next(batches)
        deadline = time.monotonic() + 60
        while tokens.call_count < 2 * (1 + BATCHES_AHEAD) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert tokens.call_count == 2 * (1 + BATCHES_AHEAD)
        assert one.state_dict()["sequence"] == 2


# ------------------------------------------------------------------ documents


def test_documents_that_do_not_see_each_other_have_places_of_their_own(tmp_path: Path) -> None:
    eight = write_packed(tmp_path / "eight", [[str(i) * 50 for i in range(8)]])
    batches = iter(build(packed(eight, positions=True), batch=1, seq_len=30))
    starts_in_batch = 0
    for inputs, expected in itertools.islice(batches, 10):
        (row,), (place,), (label,) = (
            one.tolist() for one in (inputs["input"], inputs["positions"], expected)
        )
        starts = [0, *(i + 1 for i in range(29) if row[i] == EOS)]
        starts_in_batch += len(starts) - 1
        assert place == [i - max(s for s in starts if s <= i) for i in range(30)]
        assert [i for i, one in enumerate(label) if one == IGNORE_INDEX] == [
            i for i, token in enumerate(row) if token == EOS
        ]
    assert starts_in_batch > 3
