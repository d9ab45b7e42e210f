"""A checkpoint is read as plain data, through every door."""

from __future__ import annotations

import io
import itertools
import json
import pickle
import random
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from tests.examples import ROOT, assert_same
from torchtitan_ext import CheckpointReader, CheckpointWriter
from torchtitan_ext.plugin import loading, storage
from torchtitan_ext.plugin.storage import CHECKSUMS, find_damage
from torchtitan_ext.runs.stores import store_of

SHARD = "__0_0.distcp"
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning"),
]


class Crafted:
    """Unpickled, it makes a file: what it would do is up to who wrote it."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.trace,)


def state(fill: float = 0.0) -> dict[str, Any]:
    weight = torch.full((3, 4), fill, dtype=torch.bfloat16)
    return {"model": {"w": weight}, "train": {"step": int(fill), "names": ["a", "b"]}}


def save(folder: Path, content: Mapping[str, Any], *, sums: bool = False) -> Path:
    writer = (CheckpointWriter if sums else FileSystemWriter)(folder)
    dcp.save(dict(content), storage_writer=writer, no_dist=True)
    return folder


Door = Callable[[dict[str, Any], Path], None]


def plain_recipe(content: dict[str, Any], folder: Path) -> None:
    dcp.load(content, storage_reader=CheckpointReader(folder), no_dist=True)


def torchtitan(content: dict[str, Any], folder: Path) -> None:
    loading.load(content, str(folder))


def pytorch(content: dict[str, Any], folder: Path) -> None:
    dcp.load(content, checkpoint_id=folder, no_dist=True)


def read(folder: Path, door: Door = plain_recipe) -> dict[str, Any]:
    content = state()
    door(content, folder)
    return content


def refusal(folder: Path, door: Door = plain_recipe) -> str:
    """The error; DCP of PyTorch 2.11 keeps why metadata could not be read to itself and the log."""
    with (
        mock.patch.object(storage.logger, "error") as log,
        pytest.raises((ValueError, CheckpointException)) as caught,
    ):
        read(folder, door)
    text = str(caught.value)
    is_told = "global metadata read failed" in text or not log.called
    return text if is_told else str(log.call_args.args[1])


@pytest.mark.parametrize("door", [plain_recipe, torchtitan, pytorch])
@pytest.mark.parametrize("sums", [False, True])
def test_what_was_saved_is_read(tmp_path: Path, door: Door, sums: bool) -> None:
    for fill in (1.0, 3.0):  # written over
        folder = save(tmp_path / "good", state(fill), sums=sums)
    assert (folder / CHECKSUMS).exists() == sums
    assert find_damage(folder) == ""
    found = read(folder, door)
    assert torch.equal(found["model"]["w"], state(3.0)["model"]["w"])
    assert found["train"] == {"step": 3, "names": ["a", "b"]}


@pytest.mark.parametrize("scheme", ["file", "memory"])
@pytest.mark.parametrize("door", [plain_recipe, torchtitan])
def test_an_object_store_is_written_checked_and_read(
    tmp_path: Path, door: Door, scheme: str
) -> None:
    """Through fsspec, by the URL."""
    url: Any = f"{scheme}://{tmp_path}/step-1"
    for fill in (1.0, 3.0):  # written over
        writer = CheckpointWriter(url, thread_count=2)
        dcp.save(state(fill), storage_writer=writer, no_dist=True)
    store = store_of(url)
    assert store.isfile("__0_1.distcp")  # of the second thread
    assert torch.equal(read(url, door)["model"]["w"], state(3.0)["model"]["w"])
    assert find_damage(url) == ""
    store.pipe_file(SHARD, flip(store.cat_file(SHARD)))
    assert find_damage(url) == f"{SHARD} has other bytes than were written"
    assert f"{SHARD} has other bytes" in refusal(url, door)
    store.rm_file(".metadata")
    assert find_damage(url).startswith(".metadata: ")
    store.pipe_file(CHECKSUMS, b"{")
    assert f"{url}/{CHECKSUMS}: cannot be read" in refusal(url, door)


@pytest.mark.parametrize("url", ["moon://a", "s3://bucket/run"])
def test_a_store_without_a_driver_is_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ValueError, match=f"^{url}: .*(not known|s3fs)"):
        store_of(url)


@pytest.mark.parametrize("door", [plain_recipe, torchtitan])
@pytest.mark.parametrize("is_in_metadata", [False, True])
def test_what_is_crafted_runs_nothing(tmp_path: Path, door: Door, is_in_metadata: bool) -> None:
    folder, crafted = tmp_path / "crafted", Crafted(tmp_path / "trace")
    message = "train.step: found getattr, expected"
    save(folder, {**state(1.0), "train": {"step": crafted, "names": ["a"]}})
    if is_in_metadata:
        message = f"{folder / '.metadata'}: found pathlib"
        (folder / ".metadata").write_bytes(pickle.dumps({"x": crafted}))
    assert message in refusal(folder, door)
    assert not crafted.trace.exists()


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b"])
def test_data_outside_of_the_folder_is_not_read(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path / "moved", state(1.0), sums=True)
    message = f"found data in '{name}', expected a file"
    sums = json.loads((folder / CHECKSUMS).read_text())
    (folder / CHECKSUMS).write_text(json.dumps({**sums, name: [1, 1]}))
    assert message in find_damage(folder)
    (folder / CHECKSUMS).unlink()
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = name
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert message in refusal(folder)


def flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "garbage": lambda data: random.Random(0).randbytes(len(data)),
    "other": lambda data: pickle.dumps({"no": "metadata"}),
    "flipped": flip,
    "longer": lambda data: data + b"\0",
    "renamed": lambda data: data.replace(b"train.step", b"train.stdp"),
}


def test_dtypes_alone_come_from_torch(tmp_path: Path) -> None:
    saved = {
        str(dtype): torch.zeros(2, dtype=dtype)
        for dtype in (torch.float64, torch.float16, torch.int8, torch.bool, torch.complex64)
    }
    found = CheckpointReader(save(tmp_path / "dtypes", saved)).read_metadata()
    assert found.state_dict_metadata.keys() == saved.keys()
    (tmp_path / ".metadata").write_bytes(b"\x80\x04ctorch\nload\n.")
    with pytest.raises(ValueError, match=r"found torch\.load, expected classes of"):
        CheckpointReader(tmp_path).read_metadata()


# ---------------------------------------------------------------- checksums


@pytest.mark.parametrize(
    ("name", "how"),
    [
        (".metadata", "renamed"),  # no missing key
        *itertools.product((".metadata", SHARD), ("flipped", "longer", "cut", "garbage")),
    ],
)
def test_any_change_of_any_file_is_found(tmp_path: Path, name: str, how: str) -> None:
    folder = save(tmp_path / "damaged", state(1.0), sums=True)
    assert find_damage(folder) == ""
    (folder / name).write_bytes(DAMAGE[how]((folder / name).read_bytes()))
    assert find_damage(folder).startswith(name)
    # Of two ranks one reads the file; both see its size.
    by_rank = [find_damage(folder, rank, 2) for rank in range(2)]
    assert sum(map(bool, by_rank)) == (2 if how in ("longer", "cut") else 1)
    message = f"damaged: {SHARD} " if name == SHARD else "metadata: found other bytes than"
    assert message in refusal(folder)
    (folder / name).unlink()
    assert find_damage(folder) == f"{name}: No such file or directory"
    (folder / CHECKSUMS).write_text("{")
    assert find_damage(folder).startswith(f"{CHECKSUMS} is damaged: ")


def test_without_checksums_what_can_be_read_is_loaded(tmp_path: Path) -> None:
    folder = save(tmp_path / "unchecked", state(1.0), sums=True)
    (folder / CHECKSUMS).unlink()
    data, weight = (folder / SHARD).read_bytes(), state(1.0)["model"]["w"].view(torch.uint8)
    (folder / SHARD).write_bytes(data.replace(weight.numpy().tobytes(), bytes(weight.numel())))
    assert find_damage(folder) == ""
    assert not read(folder)["model"]["w"].any()
    (folder / SHARD).write_bytes(DAMAGE["cut"](data))
    assert "EOFError" in refusal(folder)


@pytest.mark.parametrize(("method", "is_whole"), [("write_data", False), ("finish", True)])
def test_a_kill_leaves_metadata_last_and_checksums_before(
    tmp_path: Path, method: str, is_whole: bool
) -> None:
    stock = getattr(FileSystemWriter, method)

    def killed(*args: Any) -> None:
        stock(*args)
        raise OSError("killed")

    folder = save(tmp_path / "killed", state(1.0), sums=True)
    with (
        mock.patch.object(FileSystemWriter, method, killed),
        pytest.raises(CheckpointException, match="killed"),
    ):
        save(folder, state(2.0), sums=True)
    assert (folder / ".metadata").exists() == is_whole
    if is_whole:
        assert find_damage(folder) == ""
        (folder / SHARD).write_bytes(flip((folder / SHARD).read_bytes()))
        assert find_damage(folder) == f"{SHARD} has other bytes than were written"


def test_an_enum_that_python_pickled_by_name_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.11.0 to 3.11.3, such as that of Debian 12, asks for a member by ``getattr``."""

    def reduce(member: Any, protocol: int) -> tuple[Any, ...]:
        return getattr, (type(member), member.name)

    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", reduce)
    folder, loaded = save(tmp_path / "saved", state(1.0)), state()
    assert b"getattr" in (folder / ".metadata").read_bytes()
    plain_recipe(loaded, folder)
    assert_same(loaded, state(1.0))
    reader = storage._Unpickler(io.BytesIO(pickle.dumps(Attribute())))
    with pytest.raises(ValueError, match="expected a member of an enum"):
        reader.load()


class Attribute:
    """Unpickled, it is a method of a class that metadata may hold."""

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (PurePosixPath, "with_name")


def test_nothing_else_unpickles() -> None:
    """All that reads a file of a run, or of a checkpoint, goes through one reader."""
    unsafe = re.compile(
        r"pickle\.loads?\(|FileSystemReader\(|FsspecReader\(|weights_only=False|np\.load\(|"
        r"\bshelve\b|\bmarshal\b|joblib|checkpoint_id=(?!checkpoint_id)"
    )
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for folder in ("amo_dist", "torchtitan_ext", "launch")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line in path.read_text().splitlines()
        if unsafe.search(line) or ("torch.load(" in line and "weights_only=True" not in line)
    ]
    assert found == []
