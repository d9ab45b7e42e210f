"""`amo tokenize`: shards that a killed run goes on with, and streams that read them."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.data_corpus import build, dataset, write_jsonl, write_parquet
from torchtitan_ext import cli
from torchtitan_ext.data.packed import PackedSequences
from torchtitan_ext.data.tokenizers import ByteTokenizer
from torchtitan_ext.tools import tokenize

TEXTS = [f"{i} " + "x" * (3 * i % 17) for i in range(40)]
LENGTH = 9


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", [{"text": text} for text in TEXTS[:15]])
    write_parquet(folder / "b.parquet", [{"text": text} for text in [*TEXTS[15:], ""]])
    return folder


def run(corpus: Path, output: Path, *options: str) -> int:
    start = ["tokenize", str(corpus), "-o", str(output), "--tokenizer", "byte", "--bad-rows=skip"]
    return cli.main([*start, f"--seq-len={LENGTH - 1}", "--shard-sequences=7", *options])


def content(output: Path) -> dict[str, bytes]:
    return {str(p.relative_to(output)): p.read_bytes() for p in output.rglob("*") if p.is_file()}


def packed_tokens() -> list[int]:
    return [t for text in TEXTS for t in ByteTokenizer().encode(text, add_eos=True)]


def test_shards_hold_the_documents_in_order(corpus: Path, tmp_path: Path, capsys: Any) -> None:
    output = tmp_path / "packed"
    assert run(corpus, output) == 0
    tokens = packed_tokens()
    count = len(tokens) // LENGTH
    assert f"{count} sequences, {count * LENGTH} tokens" in capsys.readouterr().out
    sequences = PackedSequences(str(output))
    assert len(sequences) == count
    assert [t for i in range(count) for t in sequences[i]] == tokens[: count * LENGTH]
    index = json.loads(next(output.rglob("index.json")).read_text())
    assert index["skipped"] == {"empty": 1}
    assert [s["num_sequences"] for s in index["shards"][:-1]] == [7] * (count // 7)
    # A finished run has nothing to add.
    before = content(output)
    assert run(corpus, output) == 0
    assert content(output) == before


@pytest.mark.parametrize("num_writes", range(1, 12, 2))
def test_a_killed_run_goes_on_to_the_same_bytes(
    num_writes: int, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(corpus, tmp_path / "whole")
    expected = content(tmp_path / "whole")
    output = tmp_path / "packed"
    left = num_writes
    real = os.replace

    class Killed(BaseException):
        pass

    def replace(scratch: Path, target: Path) -> None:
        nonlocal left
        left -= 1
        if left < 0:  # the temporary file is written, and not yet in place
            raise Killed
        real(scratch, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(Killed):
        run(corpus, output)
    monkeypatch.undo()
    if num_writes > 1:
        with pytest.raises(ValueError, match="tokenizing is not complete"):
            PackedSequences(str(output))
    assert run(corpus, output) == 0
    assert content(output) == expected  # no temporary file is left over either


def test_parts_together_hold_every_document_once(corpus: Path, tmp_path: Path) -> None:
    output = tmp_path / "packed"
    for part in range(3):
        if part:
            with pytest.raises(ValueError, match=r"found parts .* of 3"):
                PackedSequences(str(output))
        assert run(corpus, output, f"--part={part}/3", "--seq-len=1") == 0
    # Sequences of two tokens: at most one token of each part is dropped.
    sequences = PackedSequences(str(output))
    found = Counter(t for i in range(len(sequences)) for t in sequences[i])
    lost = Counter(packed_tokens()) - found
    assert found <= Counter(packed_tokens())
    assert sum(lost.values()) <= 3


def test_other_settings_are_refused(corpus: Path, tmp_path: Path, capsys: Any) -> None:
    output = tmp_path / "packed"
    assert run(corpus, output) == 0
    for options, message in [
        (["--seq-len=7"], "length: was 9, is 8"),
        (["--part=3/3"], "--part: found '3/3'"),
        (["--shard-sequences=0"], "--shard-sequences: found 0"),
        (["--tokenizer=hf"], "--tokenizer-path: found none"),
        (["--text-field=body", "--bad-rows=error", "--part=0/2"], r"a.jsonl, row 1: missing"),
    ]:
        assert run(corpus, output, *options) == 2
        assert message in capsys.readouterr().err


def test_a_damaged_shard_or_index_is_named(corpus: Path, tmp_path: Path) -> None:
    output = tmp_path / "packed"
    assert run(corpus, output) == 0
    shard = sorted(output.rglob("*.bin"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-4])
    with pytest.raises(ValueError, match=r"shard_00001\.bin: found 248 bytes, expected 252"):
        PackedSequences(str(output))
    shard.unlink()
    with pytest.raises(ValueError, match=r"cannot read .*shard_00001\.bin"):
        PackedSequences(str(output))
    next(output.rglob("index.json")).write_text("[]")
    with pytest.raises(ValueError, match="not an index"):
        PackedSequences(str(output))
    with pytest.raises(ValueError, match=r"no index\.json"):
        PackedSequences(str(corpus))


def loaders(output: Path, world: int, saved: dict[str, Any]) -> list[Any]:
    config = dataset(output, "packed")
    made = [build(config, world, r, batch=4 // world) for r in range(world)]
    for one in made:
        one.load_state_dict(saved)
    return made


def batches(made: list[Any], num: int) -> list[list[tuple[int, ...]]]:
    iterators = [iter(one) for one in made]
    return [sorted(map(tuple, (r for it in iterators for r in rows(next(it))))) for _ in range(num)]


def rows(batch: Any) -> list[list[int]]:
    inputs, labels = batch
    assert inputs["input"].dtype == labels.dtype == torch.int64
    whole: list[list[int]] = torch.cat([inputs["input"], labels[:, -1:]], dim=1).tolist()
    return whole


def test_training_reads_each_sequence_once_an_epoch_and_moves_to_another_world(
    corpus: Path, tmp_path: Path
) -> None:
    output = tmp_path / "packed"
    run(corpus, output)
    sequences = PackedSequences(str(output))
    num = len(sequences) // 4
    expected = batches(loaders(output, 1, {}), 2 * num)
    drawn = Counter(row for batch in expected[:num] for row in batch)
    assert drawn <= Counter(tuple(sequences[i]) for i in range(len(sequences)))
    first = loaders(output, 2, {})
    assert batches(first, 3) == expected[:3]
    saved = {k: v for one in first for k, v in one.state_dict().items()}
    assert batches(loaders(output, 4, saved), 2 * num - 3) == expected[3:]
    # In another order than that of the corpus.
    start = [tuple(sequences[i]) for i in range(4)]
    assert expected[0] != sorted(start)


def test_training_refuses_another_length_or_tokenizer(corpus: Path, tmp_path: Path) -> None:
    output = tmp_path / "packed"
    run(corpus, output)
    with pytest.raises(ValueError, match=r"training\.seq_len: found 9, expected 8"):
        build(dataset(output, "packed"), seq_len=9)
    sequences = PackedSequences(str(output))
    with pytest.raises(ValueError, match=r"data\.tokenizer: found Other-3, expected ByteTokenizer"):
        sequences.check(LENGTH, "Other-3")
    with pytest.raises(ValueError, match="expected at most the number of sequences"):
        build(dataset(output, "packed", num_streams=999))


@pytest.mark.parametrize("text", ["1", "1/1", "-1/2", "a/b", "1/", "/2"])
def test_a_part_is_one_of_a_number(text: str) -> None:
    with pytest.raises(ValueError, match="--part: found"):
        tokenize.part_of(text)
