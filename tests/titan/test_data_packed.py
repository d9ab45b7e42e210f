"""`amo tokenize`: shards that a killed run goes on with, whatever the number of processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.titan.data_corpus import write_jsonl, write_parquet
from torchtitan_ext import cli
from torchtitan_ext.data import pack
from torchtitan_ext.data.files import DataError, find_files
from torchtitan_ext.data.pack import tokenize
from torchtitan_ext.data.shards import Corpus, read_index
from torchtitan_ext.data.tokenizers import ByteTokenizer
from torchtitan_ext.tools import tokenize as command

TEXTS = [f"{i} " + "x" * (3 * i % 17) for i in range(40)]
SCORES = [float(7 * i % 11) for i in range(40)]


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two files of rows, one of which is bad, in batches of one or two."""
    monkeypatch.setattr(pack, "BATCH", 128)
    folder = tmp_path / "corpus"
    folder.mkdir()
    rows = [{"text": text, "score": s} for text, s in zip(TEXTS, SCORES, strict=True)]
    write_jsonl(folder / "a.jsonl", rows[:15])
    write_parquet(folder / "b.parquet", [*rows[15:], {"text": "", "score": 0.0}])
    return folder


def run(corpus: Path, output: Path, *options: str) -> int:
    start = ["tokenize", str(corpus), "-o", str(output), "--tokenizer", "byte"]
    return cli.main([*start, "--max-bad-rows=0.1", "--shard-tokens=70", *options])


def content(output: Path) -> dict[str, bytes]:
    return {str(p.relative_to(output)): p.read_bytes() for p in output.rglob("*") if p.is_file()}


def tokens_of(texts: list[str]) -> list[int]:
    return [t for text in texts for t in ByteTokenizer().encode(text, add_eos=True)]


def read(corpus: Corpus) -> list[int]:
    return [t for i in range(corpus.num_sequences(1)) for t in corpus.sequence(i, 1)[:1].tolist()]


def test_shards_hold_the_documents_in_order(corpus: Path, tmp_path: Path, capsys: Any) -> None:
    output = tmp_path / "packed"
    assert run(corpus, output) == 0
    tokens = tokens_of(TEXTS)
    assert f"{len(tokens)} tokens in" in capsys.readouterr().out
    whole = Corpus(output)
    assert read(whole) == tokens[:-1]
    # Any length of sequences, each with one token more than the model sees.
    assert whole.num_sequences(100) == (len(tokens) - 1) // 100
    assert whole.sequence(2, 100).tolist() == tokens[200:301]
    index = read_index(output)
    assert index is not None
    assert (index.num_rows, index.bad_rows) == (41, {"empty": 1})
    assert len(index.shards) > 4
    # A finished run has nothing to add.
    before = content(output)
    assert run(corpus, output) == 0
    assert content(output) == before


@pytest.mark.parametrize("order", ["ascend", "descend"])
def test_an_order_sorts_documents_by_score(order: str, corpus: Path, tmp_path: Path) -> None:
    output = tmp_path / "packed"
    assert run(corpus, output, "--score-field=score") == 0
    sign = 1 if order == "ascend" else -1
    places = sorted(range(40), key=lambda i: sign * SCORES[i])
    assert read(Corpus(output, order)) == tokens_of([TEXTS[i] for i in places])[:-1]
    assert read(Corpus(output)) == tokens_of(TEXTS)[:-1]
    assert run(corpus, tmp_path / "unscored") == 0
    with pytest.raises(ValueError, match=r"dataloader\.order: found 'ascend'.*--score-field"):
        Corpus(tmp_path / "unscored", "ascend")


@pytest.mark.parametrize("num_writes", range(1, 9, 2))
def test_a_run_killed_twice_goes_on_to_the_same_bytes(
    num_writes: int, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(corpus, tmp_path / "whole", "--score-field=score")
    expected = content(tmp_path / "whole")
    output = tmp_path / "packed"
    real = os.replace

    class Killed(BaseException):
        pass

    for _ in range(2):
        left = num_writes

        def replace(scratch: Path, target: Path) -> None:
            nonlocal left
            left -= 1
            if left < 0:  # the temporary file is written, and not yet in place
                raise Killed
            real(scratch, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", replace)
            with pytest.raises(Killed):
                run(corpus, output, "--score-field=score")
    if num_writes > 2:
        with pytest.raises(ValueError, match="tokenizing is not complete"):
            Corpus(output)
    assert run(corpus, output, "--score-field=score") == 0
    assert content(output) == expected  # no temporary file is left over either


@pytest.mark.slow
def test_processes_write_the_bytes_of_one(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name in "ab":
        write_jsonl(folder / f"{name}.jsonl", [{"text": f"{name} {i} " * 500} for i in range(999)])
    for processes in (1, 2):
        output = tmp_path / str(processes)
        for _ in tokenize(find_files(str(folder)), ByteTokenizer(), output, processes=processes):
            pass
    assert content(tmp_path / "1") == content(tmp_path / "2")
    with pytest.raises(DataError, match=r"was killed; .* fewer --processes"):
        list(tokenize(find_files(str(folder)), Deadly(), tmp_path / "3", processes=2))


class Deadly(ByteTokenizer):
    """Ends its process, as the kernel does where memory runs out."""

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        os._exit(9)


def test_parts_together_hold_every_document_once(corpus: Path, tmp_path: Path) -> None:
    output = tmp_path / "packed"
    assert run(corpus, output, "--part=0/2") == 0
    with pytest.raises(ValueError, match=r"found parts \[0\] of 2"):
        Corpus(output)
    assert run(corpus, output, "--part=1/2") == 0
    assert read(Corpus(output)) == tokens_of(TEXTS)[:-1]


def test_what_cannot_be_done_is_refused(corpus: Path, tmp_path: Path, capsys: Any) -> None:
    output = tmp_path / "packed"
    assert run(corpus, output) == 0
    for options, message in [
        (["--score-field=score"], "score_field: was '', is 'score'"),
        (["--part=3/3"], "--part: found '3/3'"),
        (["--part=2/3"], "--part: found 2/3, expected at most 2 parts"),
        (["--shard-tokens=0"], "--shard-tokens: found 0"),
        (["--max-bad-rows=2"], "--max-bad-rows: found 2.0"),
        (["--max-bad-rows=0.01"], "found 1 bad rows among 41 (1 empty)"),
        (["--tokenizer=hf"], "--tokenizer-path: found none"),
        (["--text-field=body", "--part=0/2"], "(15 missing), expected a share of at most 0.1"),
    ]:
        assert run(corpus, output, *options) == 2
        assert message in capsys.readouterr().err


def test_a_damaged_shard_or_index_is_named(corpus: Path, tmp_path: Path) -> None:
    output = tmp_path / "packed"
    assert run(corpus, output) == 0
    shard = sorted(output.rglob("*.tokens"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-4])
    expected = rf"shard_00001\.tokens: found {len(whole) - 4} bytes, expected {len(whole)}"
    with pytest.raises(ValueError, match=expected):
        Corpus(output)
    shard.unlink()
    with pytest.raises(ValueError, match=r"cannot read .*shard_00001\.tokens"):
        Corpus(output)
    (output / "index.json").write_text("[]")
    with pytest.raises(ValueError, match="not an index"):
        Corpus(output)
    with pytest.raises(ValueError, match=r"no index\.json"):
        Corpus(corpus)


def test_the_digest_is_that_of_the_tokens_and_not_of_where_they_come_from(
    corpus: Path, tmp_path: Path
) -> None:
    assert run(corpus, tmp_path / "one") == 0
    os.utime(corpus / "a.jsonl")
    assert run(corpus, tmp_path / "two") == 0
    one, two = Corpus(tmp_path / "one"), Corpus(tmp_path / "two")
    assert one.digest == two.digest
    index = json.loads((tmp_path / "two" / "index.json").read_text())
    assert np.dtype(index["settings"]["token_type"]).itemsize == 2
    (corpus / "a.jsonl").write_text('{"text": "other"}\n')
    assert run(corpus, tmp_path / "three") == 0
    assert Corpus(tmp_path / "three").digest != one.digest


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_tokens_and_disk_are_estimated_from_the_first_rows(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "SAMPLE_BYTES", 2000)  # a sixth of a file
    folder = tmp_path / "corpus"
    folder.mkdir()
    suffix = "jsonl" if write is write_jsonl else "parquet"
    for name in "ab":
        write(folder / f"{name}.{suffix}", [{"text": "x" * 99} for _ in range(120)])
    assert run(folder, tmp_path / "out") == 0
    line = capsys.readouterr().out.splitlines()[0]
    # 24,000 tokens; both files are of one size, and all rows are alike.
    assert line.startswith("about 2.4e+04 tokens, 4.8e-05 GB on disk of ")
    assert re.search(r" 0:00:\d\d hours in \d+ processes \(from the first \d\d rows\)$", line)
    assert run(folder, tmp_path / "out") == 0
    assert "about" not in capsys.readouterr().out  # of what is done


def test_a_corpus_without_a_name_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["tokenize", "", "-o", str(tmp_path), "--tokenizer=byte"]) == 2
    assert capsys.readouterr().err.startswith("error: source: found '', expected a folder, a file")


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_an_interrupt_ends_all_processes_in_one_line(processes: int, tmp_path: Path) -> None:
    rows = [{"text": "word " * 1000}] * 4000
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    words = ["tokenize", str(path), "-o", str(tmp_path / "out"), "--tokenizer=byte"]
    run = subprocess.Popen(
        [sys.executable, "-m", "torchtitan_ext", *words, f"--processes={processes}"],
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that runs the tests in the background has them ignore interrupts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not (tmp_path / "out" / "lock").exists():
        assert run.poll() is None
        time.sleep(0.05)
    os.killpg(run.pid, signal.SIGINT)  # as a terminal sends it
    _, errors = run.communicate(timeout=120)
    assert (run.returncode, errors) == (130, "interrupted\n")
