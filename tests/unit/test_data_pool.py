"""A pool of documents in memory-mapped files: shuffled as a whole, or by score."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchtitan.config import TrainingConfig

from tests.unit.data_corpus import build, dataset, write_arrow, write_jsonl, write_parquet
from torchtitan_ext.data.files import find_files
from torchtitan_ext.data.pool import Pool
from torchtitan_ext.data.streams import SortedOrder

NUM = 24
SCORES = [(7 * i) % NUM // 2 * 0.25 for i in range(NUM)]  # each twice


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    rows = [{"text": chr(65 + i) * 8, "score": score} for i, score in enumerate(SCORES)]
    write_arrow(folder / "a.arrow", rows[:7])
    write_jsonl(folder / "b.jsonl.gz", rows[7:15])
    write_parquet(folder / "c.parquet", rows[15:])
    return folder


def test_documents_of_all_formats_are_numbered_in_order(corpus: Path) -> None:
    pool = Pool(find_files(str(corpus)), score_field="score")
    assert [pool.text(i) for i in range(len(pool))] == [chr(65 + i) * 8 for i in range(NUM)]
    assert list(pool.scores()) == SCORES


def test_a_changed_corpus_is_converted_anew(corpus: Path) -> None:
    assert len(Pool(find_files(str(corpus)))) == NUM
    write_jsonl(corpus / "d.jsonl", [{"text": "new"}])
    files = find_files(str(corpus))
    assert len(Pool(files)) == NUM + 1
    assert Pool(files).digest() == files.digest


@pytest.mark.parametrize("score", [None, "high", float("nan"), True])
def test_a_row_without_a_score_is_a_bad_one(score: object, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": "a", "score": 1}, {"text": "b", "score": score}])
    files = find_files(str(tmp_path / "a.jsonl"))
    with pytest.raises(ValueError, match=r"a\.jsonl, row 2: no score .*data\.bad_rows"):
        Pool(files, score_field="score")
    assert len(Pool(files, score_field="score", bad_rows="skip")) == 1
    assert len(Pool(files)) == 2  # nobody asks for scores


@given(st.lists(st.sampled_from([-1.5, 0.0, 2.0, 2.25]), max_size=12))
def test_sorted_orders_are_stable_both_ways(scores: list[float]) -> None:
    for descend, sign in ((False, 1), (True, -1)):
        order = list(SortedOrder(scores, descend)(3))
        assert order == sorted(range(len(scores)), key=lambda i: (sign * scores[i], i))


def drawn(folder: Path, world: int, num: int, **data: Any) -> list[str]:
    """The letters of each global batch: a sequence holds one document and its end token."""
    config = dataset(folder, "pool", **data)
    loaders = [build(config, world, r, batch=4 // world) for r in range(world)]
    iterators = [iter(one) for one in loaders]
    batches = []
    for _ in range(num):
        inputs = [next(it)[0]["input"] for it in iterators]
        batches.append("".join(sorted(chr(int(row[0])) for i in inputs for row in i)))
    return batches


@pytest.mark.parametrize("world", [1, 4])
def test_global_batches_go_by_score_in_any_world(world: int, corpus: Path) -> None:
    by_score = sorted(range(NUM), key=lambda i: (SCORES[i], i))
    for order, numbers in (
        ("ascend", by_score),
        ("descend", sorted(range(NUM), key=lambda i: (-SCORES[i], i))),
    ):
        expected = [
            "".join(sorted(chr(65 + i) for i in numbers[at : at + 4])) for at in range(0, NUM, 4)
        ]
        # The second epoch is like the first.
        assert drawn(corpus, world, 12, order=order) == expected * 2


def test_uniform_draws_each_document_once_in_another_order_each_epoch(corpus: Path) -> None:
    batches = drawn(corpus, 2, 12)
    epochs = [batches[:6], batches[6:]]
    for epoch in epochs:
        assert sorted("".join(epoch)) == [chr(65 + i) for i in range(NUM)]
    assert epochs[0] != epochs[1]
    assert drawn(corpus, 1, 12) == batches


@pytest.mark.parametrize("order", ["uniform", "ascend"])
def test_all_orders_leave_out_the_rows_without_a_score(
    order: str, corpus: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_jsonl(corpus / "d.jsonl", [{"text": "zzzzzzzz"}])
    with pytest.raises(ValueError, match="row 1: no score"):
        drawn(corpus, 1, 6, order=order, score_field="score")
    batches = drawn(corpus, 1, 6, order=order, score_field="score", bad_rows="skip")
    assert sorted("".join(batches)) == [chr(65 + i) for i in range(NUM)]


def test_the_field_of_scores_is_part_of_the_source(corpus: Path) -> None:
    scored = build(dataset(corpus, "pool", score_field="score"))
    other = build(dataset(corpus, "pool"))
    with pytest.raises(ValueError, match="score_field: was 'score', is None"):
        other.load_state_dict(scored.state_dict())


@pytest.mark.parametrize(
    ("steps", "batch", "told"),
    [
        # 24 documents of nine tokens: 216, or 13.5 steps of a rank with two sequences of eight.
        (13, -1, ""),
        (12, -1, "draws 192 tokens of a pool of about 216: documents at the end of"),
        (16, -1, "draws 256 tokens of a pool of about 216: documents are drawn again"),
        (16, 8, "draws 1.02e+03 tokens"),
    ],
)
def test_a_run_that_does_not_fit_its_scored_pool_is_told(
    steps: int, batch: int, told: str, corpus: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = dataset(corpus, "pool", order="ascend")
    build(config)
    assert not caplog.text  # of a loader for itself
    config._training = TrainingConfig(
        steps=steps, global_batch_size=batch, local_batch_size=2, seq_len=8
    )
    build(config)
    assert told in caplog.text
    assert bool(told) == ("training.steps" in caplog.text)
    caplog.clear()
    build(config, 2, 1)  # another rank has told
    assert not caplog.text


def test_a_resume_refuses_another_order(corpus: Path) -> None:
    one = build(dataset(corpus, "pool", order="ascend"))
    other = build(dataset(corpus, "pool", order="descend"))
    with pytest.raises(ValueError, match="order: was 'ascend', is 'descend'"):
        other.load_state_dict(one.state_dict())
