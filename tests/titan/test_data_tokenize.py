"""`amo tokenize`: rows of files to shards, by tasks that a killed run does not make again."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import json
import lzma
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow.parquet
import pytest
import zstandard

from tests.titan.data_corpus import END, bpe_folder, write_jsonl, write_packed
from torchtitan_ext import cli
from torchtitan_ext.data.corpus import SETTINGS, Corpus, open_packed
from torchtitan_ext.data.pipeline import FORMATS
from torchtitan_ext.data.tokenizers import ByteTokenizer, HFTokenizer

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # of datatrove's log files


def run(source: Path | str, output: Path, *options: str) -> int:
    return cli.main(["tokenize", str(source), "-o", str(output), "--tokenizer=byte", *options])


def tokens_of(corpus: Corpus) -> bytes:
    """All tokens but the last, which over bytes are the text, each document ended by ``|``."""
    tokens = corpus.sequence(0, corpus.num_tokens - 1)
    return bytes(ord("|") if token == 256 else token for token in tokens)


def texts_of(output: Path) -> list[str]:
    return sorted(tokens_of(open_packed(str(output), ByteTokenizer())).decode().split("|")[:-1])


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Ten documents in files of all kinds, and every kind of bad row."""
    folder = tmp_path / "lang=en"
    folder.mkdir()
    rows = [{"text": f"text {i} é", "score": -i, "other": i} for i in range(8)]
    table = pyarrow.Table.from_pylist([*rows[:3], {"text": None, "score": 1, "other": 2}])
    pyarrow.parquet.write_table(table, folder / "a.parquet")
    bad = [{"text": ""}, {"text": " \n"}, {"text": 3}, {"other": 1}, {"text": "x"}, [1], 7]
    write_jsonl(folder / "b.jsonl", [*rows[3:5], *bad])
    with (folder / "b.jsonl").open("ab") as file:
        file.write(b'not json\n\n{"text": "\xff"}\n{"text": "\\ud800"}\n')
    lines = "".join(json.dumps(row) + "\n" for row in rows[5:]).encode()
    (folder / "c.json.gz").write_bytes(gzip.compress(lines))
    (folder / "readme.md").write_text("plain text")
    (folder / "sub").mkdir()
    (folder / "sub" / "d.txt").write_text("a text file\nof two lines")
    (folder / "sub" / "e.txt").write_bytes(b"\xff")
    return folder


def test_good_rows_are_tokenized_and_bad_ones_counted(corpus: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert run(corpus, output, "--max-bad-rows=0.9", "--tasks=2") == 0
    rows = [f"text {i} é" for i in range(8)]
    assert texts_of(output) == sorted([*rows, "a text file\nof two lines", "x"])
    steps = json.loads((output / "logs" / "stats.json").read_text())
    (counts,) = (step["stats"] for step in steps if step["name"].endswith("rows"))
    by_reason = {name[10:]: int(n) for name, n in counts.items() if name.startswith("bad rows: ")}
    assert by_reason == {"not JSON": 3, "not UTF-8": 1, "no text": 7}
    listed = "".join(path.read_text() for path in (output / "logs" / "logs").iterdir())
    assert "bad row b.jsonl:6: " in listed
    # The same text, copied later: the same corpus.
    os.utime(corpus / "b.jsonl")
    assert run(corpus, tmp_path / "again", "--max-bad-rows=0.9", "--tasks=2") == 0
    digests = {open_packed(str(tmp_path / n), ByteTokenizer()).digest for n in ("out", "again")}
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("pattern", "count"),
    [("?.j*", 6), ("[ac].*", 6), ("b.jsonl", 3), ("**/*.txt", 1), (".md", 1)],
)
def test_a_pattern_selects_files(pattern: str, count: int, corpus: Path, tmp_path: Path) -> None:
    assert run(corpus, tmp_path / "out", "--max-bad-rows=1", f"--pattern={pattern}") == 0
    assert len(texts_of(tmp_path / "out")) == count


@pytest.mark.parametrize("order", ["ascend", "descend"])
def test_an_order_sorts_documents_by_score(
    order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Longer indexes than a corpus that is not sorted reads.
    monkeypatch.setattr("torchtitan_ext.data.corpus.INDEX_TAIL", 16)
    scores = [3, 1.5, 1.5, -2, 8, 0, 1, 2]
    rows = [{"text": f"text {i}", "score": score} for i, score in enumerate(scores)]
    for number in range(2):
        write_jsonl(tmp_path / f"{number}.jsonl", [*rows[number::2], {"text": "a", "score": True}])
    options = ("--score-field=score", "--tasks=2", "--max-bad-rows=0.2")
    assert run(tmp_path, tmp_path / "out", *options) == 0
    tokens = tokens_of(open_packed(str(tmp_path / "out"), ByteTokenizer(), order))
    # Of one score: in the order of the corpus.
    in_corpus = [*range(0, 8, 2), *range(1, 8, 2)]
    expected = sorted(in_corpus, key=lambda i: scores[i] * (1 if order == "ascend" else -1))
    assert tokens == "".join(f"text {i}|" for i in expected).encode()


def test_a_tokenizer_writes_its_own_tokens(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": f"return {END} {i}"} for i in range(9)])
    options = ("--tokenizer=hf", f"--tokenizer-path={bpe_folder()}")
    assert run(tmp_path, tmp_path / "out", *options) == 0
    tokenizer = HFTokenizer(str(bpe_folder()))
    corpus = open_packed(str(tmp_path / "out"), tokenizer)
    expected = [t for i in range(9) for t in tokenizer.encode(f"return {END} {i}", add_eos=True)]
    assert corpus.sequence(0, corpus.num_tokens - 1).tolist() == expected
    with pytest.raises(ValueError, match=r"^tokenizer\.kind: "):
        open_packed(str(tmp_path / "out"), ByteTokenizer())


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_bytes_of_an_undisturbed_one(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(4):
        rows = [{"text": f"{number} {i} " * 100} for i in range(4000)]
        write_jsonl(source / f"{number}.jsonl", rows)
    command = [sys.executable, "-m", "torchtitan_ext", "tokenize", str(source), "--tokenizer=byte"]
    command += ["--tasks=4", "--executor-option=workers=2", "-o"]
    output, done = tmp_path / "out", tmp_path / "out" / "logs" / "completions"
    with subprocess.Popen(
        [*command, str(output)], start_new_session=True, stderr=subprocess.DEVNULL
    ) as process:
        while not (done.exists() and any(done.iterdir())):
            assert process.poll() is None
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
    finished = {path.name for path in done.iterdir()}
    before = {path.name: path.stat().st_mtime_ns for path in output.glob("*.ds")}
    if len(finished) < 4:
        with pytest.raises(ValueError, match=r"_unshuffled\.ds(\.index)?: found no such file"):
            open_packed(str(output), ByteTokenizer())
    assert run(source, output) == 0  # the number of tasks is that of the folder
    assert run(source, tmp_path / "whole", "--tasks=4", "--executor-option=workers=1") == 0
    first, second = (
        {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        for folder in (output, tmp_path / "whole")
    )
    assert first == second
    assert len(first) == 2 + 2 * 4
    for name, time_ns in before.items():
        if name[:5] in finished:
            assert (output / name).stat().st_mtime_ns == time_ns


def test_slurm_gets_the_tasks_and_the_programs_of_this_environment(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    options = ("--tasks=2", "--executor=slurm", "--executor-option=partition=a=b")
    with mock.patch("datatrove.executor.slurm.SlurmPipelineExecutor", autospec=True) as executor:
        assert run(tmp_path, tmp_path / "new/out", *options, "--executor-option=time=1") == 0
    (pipeline,), given = executor.call_args
    pickle.dumps(pipeline)  # as each task of the array reads it
    assert (given["tasks"], given["partition"], given["time"]) == (2, "a=b", 1)
    assert str(Path(sys.executable).parent) in given["env_command"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda shard: shard.unlink(),
        lambda shard: np.array([5, 5, 14]).tofile(shard.with_name(f"{shard.name}.index")),
        lambda shard: shard.write_bytes(b"\xff" * shard.stat().st_size),
    ],
)
def test_a_damaged_shard_is_named(damage: Any, tmp_path: Path) -> None:
    output = write_packed(tmp_path / "out", [["text 0"] * 2] * 2, [[1.0] * 2] * 2)
    damage(output / "00001_unshuffled.ds")
    with pytest.raises(ValueError, match=rf"^{output}/00001_unshuffled\.ds"):
        tokens_of(open_packed(str(output), ByteTokenizer(), "ascend"))


def test_other_settings_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": "a", "score": 1}])
    output = tmp_path / "out"
    assert run(tmp_path, output) == run(tmp_path, output) == 0  # whose logs are no source
    capsys.readouterr()
    for change in ("--score-field=score", "--tasks=3", "--pattern=.jsonl"):
        if change == "--pattern=.jsonl":  # and another file
            write_jsonl(tmp_path / "b.jsonl", [{"text": "b"}])
        assert run(tmp_path, output, change) == 2
        assert capsys.readouterr().err.startswith(f"error: {output / SETTINGS}: ")
    (output / SETTINGS).write_text("[1]")
    with pytest.raises(ValueError, match=r"^dataloader\.dataset_path: "):
        open_packed(str(output), ByteTokenizer())


def test_a_folder_is_the_same_by_another_path_and_no_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("d").mkdir()
    write_jsonl(Path("d/a.jsonl"), [{"text": "a"}])
    assert run("d", Path("out")) == run("./d", Path("out")) == run(tmp_path / "d", Path("out")) == 0
    capsys.readouterr()
    for output in ("d", "./d"):
        assert run("d", Path(output)) == 2
        assert capsys.readouterr().err.startswith("error: --output: found the folder of the source")
    assert texts_of(Path("out")) == ["a"]


# ------------------------------------------------------------------ files by suffix

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda content: zstandard.compress(content, 3),
}
ROWS = [{"text": f"text {i} é"} for i in range(4)]


def file_of(suffix: str) -> bytes:
    """Rows in several frames, with a byte order mark, Windows' ends of lines, and a blank last."""
    if suffix == ".parquet":
        file = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), file, row_group_size=2)
        return file.getvalue()
    if suffix == ".txt":
        return codecs.BOM_UTF8 + "text é\r\n".encode()
    compress = COMPRESS[suffix.removeprefix(".jsonl").removeprefix(".json")]
    lines = [json.dumps(row, ensure_ascii=False).encode() + b"\r\n" for row in ROWS]
    parts = codecs.BOM_UTF8 + lines[0], b"".join(lines[1:3]), lines[3] + b"\r\n\n"
    return b"".join(map(compress, parts))


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_file_of_each_suffix_is_read_whole_or_named(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, content = tmp_path / "source", file_of(suffix)
    source.mkdir()
    (source / f"a{suffix.upper()}").write_bytes(content)
    assert run(source, tmp_path / "out", "--max-bad-rows=0") == 0
    expected = ["text é\r\n"] if suffix == ".txt" else [row["text"] for row in ROWS]
    assert texts_of(tmp_path / "out") == expected
    if suffix in (".txt", ".jsonl", ".json"):
        return
    capsys.readouterr()
    (source / f"a{suffix.upper()}").write_bytes(content[:-9])
    assert run(source, tmp_path / "cut", "--max-bad-rows=1") == 2
    error = capsys.readouterr().err
    assert re.search(rf"error: a\{suffix.upper()}: found a damaged file: \w+: \w+", error), error
