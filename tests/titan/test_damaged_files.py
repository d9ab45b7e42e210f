"""Every file that the project reads, damaged in every way: one error that names it, and no wait."""

from __future__ import annotations

import dataclasses
import os
import pickle
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from amo_dist.__main__ import main as amo_dist
from amo_dist.config import AMOConfig
from tests.examples import ROOT
from tests.sources import plan_of
from tests.titan.data_corpus import bpe_folder, build, packed, write_packed
from torchtitan_ext import CheckpointWriter, cli
from torchtitan_ext.config import settings
from torchtitan_ext.config.schedule_file import load_schedule_file
from torchtitan_ext.data.tokenizers import Tokenizer
from torchtitan_ext.plugin import loading
from torchtitan_ext.plugin.storage import find_damage
from torchtitan_ext.runs import records, run_files
from torchtitan_ext.tools.export import find_source

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-3]),
    "empty": lambda path: path.write_bytes(b""),
    "binary": lambda path: path.write_bytes(b"\xff\xfe\x00{"),
    "deep": lambda path: path.write_bytes(b"[" * 100_000 + b"]" * 100_000 + b"\n"),
    "deep table": lambda path: path.write_bytes(b"a" + b".a" * 5000 + b" = 1\n"),
    "another form": lambda path: path.write_bytes(b"[3]"),
    "a number": lambda path: path.write_bytes(b"3"),
    "a pickle": lambda path: path.write_bytes(pickle.dumps({"no": "metadata"})),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a device": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
    "a ring": lambda path: (path.unlink(), path.symlink_to(path.name)),
}


def state() -> dict[str, Any]:
    return {"w": torch.ones(3, 4), "train": {"names": ["a", "b"]}}


def parse(path: Path) -> None:
    settings.parse([f"--job.config_file={path}"])


def load(checkpoint: Path) -> None:
    loading.load(state(), str(checkpoint))


def find(checkpoint: Path) -> None:
    if damage := find_damage(checkpoint):
        raise ValueError(f"{checkpoint}: {damage}")


def command(*words: str) -> Callable[[Path], None]:
    """A command as a user calls it, whose only output is one line."""

    def call(path: Path) -> None:
        call_it = amo_dist if words[0] == "plan" else cli.main
        if call_it([*words, str(path)]):
            raise ValueError("see standard error")

    return call


@dataclasses.dataclass(frozen=True)
class Reader:
    """A file in a folder of good ones, and what reads it.

    Attributes:
        file: Its path in the folder.
        read: Function of the path.
        accepts: Damages after which nothing is wrong with the file.
    """

    file: str
    read: Callable[[Path], object]
    accepts: tuple[str, ...] = ()


JSON_LINES = ("cut", "empty", "binary", "another form", "a number", "a pickle")
"""The last line may be cut by a kill."""

READERS = [
    Reader("config.toml", parse, ("empty",)),
    Reader("base.toml", lambda path: parse(path.with_name("config.toml")), ("empty",)),
    Reader("start.json", parse),
    Reader("schedules.toml", load_schedule_file),
    Reader("run.json", lambda path: run_files.read_config(path.parent)),
    Reader("run.json", lambda path: find_source(path.parent / "checkpoint" / "step-1")),
    Reader("plan.json", lambda path: run_files.read_plan(path.parent)),
    Reader("plan.json", command("plan", "--plan")),
    Reader("metrics.jsonl", lambda path: run_files.read_metrics(path.parent), JSON_LINES),
    Reader("step-1/.metadata", lambda path: load(path.parent)),
    Reader("step-1/.metadata", lambda path: find(path.parent)),
    Reader("step-1/__0_0.distcp", lambda path: load(path.parent)),
    Reader("step-1/checksums.json", lambda path: load(path.parent)),
    Reader("step-1/checksums.json", lambda path: find(path.parent)),
    Reader("bare/.metadata", lambda path: load(path.parent)),
    Reader("bare/__0_0.distcp", lambda path: load(path.parent)),
    Reader("corpus/tokenize.json", lambda path: build(packed(path.parent))),
    Reader("corpus/00000_unshuffled.ds", lambda path: build(packed(path.parent))),
    Reader("corpus/00000_unshuffled.ds.index", lambda path: build(packed(path.parent))),
    Reader(
        "corpus/00000_unshuffled.ds.scores",
        lambda path: build(packed(path.parent, order="ascend")),
    ),
    Reader(
        "tokenizer/tokenizer.json",
        lambda path: Tokenizer.Config(path=str(path)).build(tokenizer_path=""),
    ),
    Reader(
        "tokenizer/tokenizer_config.json",
        lambda path: Tokenizer.Config(path=str(path.parent)).build(tokenizer_path=""),
    ),
]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of every file, each whole."""
    folder = tmp_path_factory.mktemp("good")
    (folder / "config.toml").write_text('extends = "base.toml"\n[training]\nsteps = 7\n')
    base = '[tokenizer]\nkind = "byte"\n[dataloader]\ndataset = "stdlib"\n'
    (folder / "base.toml").write_text(base)
    config = settings.parse(["--tokenizer.kind=byte", f"--dump_folder={folder}"])
    settings.for_ranks(config)
    run_files.RunFiles(folder).start(1, config.to_dict())
    shutil.copy(ROOT / "configs/schedules/a1.toml", folder / "schedules.toml")
    (folder / "plan.json").write_text(plan_of(AMOConfig()).to_json())
    records.append_records(folder / "metrics.jsonl", [{"step": 1}, {"step": 2}])
    for name, writer in (("step-1", CheckpointWriter), ("bare", dcp.FileSystemWriter)):
        dcp.save(state(), storage_writer=writer(folder / name), no_dist=True)
    write_packed(folder / "corpus", [["a text of some words"] * 10], [[1.0] * 10])
    shutil.copytree(bpe_folder(), folder / "tokenizer")
    return folder


@pytest.fixture(autouse=True)
def no_wait() -> Iterator[None]:
    """A reader that waits for a pipe, or reads a device without end, is a failure."""

    def end(*_: object) -> None:
        pytest.fail("no end within a minute", pytrace=False)

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("damage", [None, *DAMAGES])
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.file)
def test_a_damaged_file_is_named_in_one_line(
    reader: Reader,
    damage: str | None,
    good: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    path = tmp_path / reader.file
    if damage is None:
        reader.read(path)
        return
    DAMAGES[damage](path)
    try:
        reader.read(path)
    except ValueError as error:
        text = str(error)
        if text == "see standard error":
            text = capsys.readouterr().err
            assert text.count("\n") == 1
        assert path.name in text or path.parent.name in text
        # No class of another library, and no reason that is only its name.
        assert re.search(r": \S.* \S", text)
    else:
        assert damage in reader.accepts
