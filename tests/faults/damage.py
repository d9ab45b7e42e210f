"""Damage to the newest checkpoint of a run, and what of it must be found."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader

KINDS = ("cut", "flip", "delete", "swap")
METADATA, CHECKSUMS = ".metadata", "checksums.json"


@dataclasses.dataclass(frozen=True)
class Expected:
    """Of a resume: where it may go on from, and the files of each checkpoint to name as damaged."""

    steps: set[int]
    damaged: dict[int, set[str]]


class Ledger:
    """Knows which checkpoints of a folder are whole."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stamps: dict[Path, tuple[int, int]] = {}
        self._originals: dict[Path, bytes] = {}  # of files that were damaged

    def complete(self) -> dict[int, Path]:
        """Checkpoints with metadata, by step, in order."""
        found = (path.parent for path in self._folder.glob(f"step-*/{METADATA}"))
        return dict(sorted((step_of(path), path) for path in found))

    def incomplete(self) -> set[int]:
        """Steps whose save was cut short."""
        return {step_of(path) for path in self._folder.glob("step-*")} - set(self.complete())

    def look(self) -> None:
        """After a run: what it wrote anew is whole again."""
        stamps = self._stamps
        self._stamps = self._read_stamps()
        changed = {path for path, stamp in self._stamps.items() if stamps.get(path) != stamp}
        rewritten = {path.parent for path in changed}
        # One that is written over is incomplete until it is whole again.
        for folder in self.complete().values():
            assert folder not in rewritten or folder / METADATA in changed, folder
        for path in [path for path in self._originals if path.parent in rewritten]:
            del self._originals[path]

    def _read_stamps(self) -> dict[Path, tuple[int, int]]:
        found = [(path, path.stat()) for path in self._folder.glob("step-*/*")]
        return {path: (stat.st_ino, stat.st_mtime_ns) for path, stat in found}

    def harm(self, rng: random.Random, kind: str) -> str:
        """Damage the newest complete checkpoint; returns what was done, empty where nothing was."""
        complete = self.complete()
        if not complete:
            return ""
        _, folder = complete.popitem()
        names = self._vulnerable(folder)
        summed = [path for path in complete.values() if CHECKSUMS in _files(path)]
        others = [(path, names & self._vulnerable(path)) for path in summed]
        others = [(path, common) for path, common in others if common]
        if kind == "swap" and not others:
            kind = "flip"
        if kind != "delete" and CHECKSUMS not in _files(folder):
            kind = "cut"  # as of old checkpoints: sizes are all that is known
        if not names:
            return ""
        if kind == "swap":
            other, names = rng.choice(others)
        path = folder / rng.choice(sorted(names))
        for each in (path, other / path.name) if kind == "swap" else (path,):
            self._originals.setdefault(each, each.read_bytes())
        if kind == "swap":
            _exchange(path, other / path.name)
        else:
            _DAMAGES[kind](path, rng)
        self._stamps = self._read_stamps()
        return f"{kind} {'shard' if path.suffix == '.distcp' else path.name}"

    def _vulnerable(self, folder: Path) -> set[str]:
        """Files of which damage shows: without their checksums it may not."""
        files, damaged = _files(folder), self._damaged(folder)
        if CHECKSUMS in damaged:
            return set()
        return files - {CHECKSUMS} if damaged else files

    def _damaged(self, folder: Path) -> set[str]:
        return {
            path.name
            for path, data in self._originals.items()
            if path.parent == folder and not (path.exists() and path.read_bytes() == data)
        }

    def expected(self) -> Expected:
        """What a resume may do."""
        steps: set[int] = set()
        named: dict[int, set[str]] = {}
        for step, folder in reversed(self.complete().items()):
            damaged = self._damaged(folder)
            if damaged == {CHECKSUMS}:
                steps.add(step)  # all that is loaded is whole, which may show or not
            elif damaged:
                named[step] = damaged
            else:
                return Expected(steps | {step}, named)
        return Expected(steps | {0}, named)


def names_one(names: set[str], text: str) -> bool:
    """Whether an error names one of these files."""
    return any(re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", text) for name in names)


def step_of(folder: Path) -> int:
    """From the name of a checkpoint's folder."""
    return int(folder.name.removeprefix("step-"))


def _files(folder: Path) -> set[str]:
    """Those that count: a smaller world that wrote over a checkpoint left others behind."""
    try:
        names = {*json.loads((folder / CHECKSUMS).read_bytes()), CHECKSUMS}
    except (FileNotFoundError, ValueError):
        names = {METADATA, *_shards(folder)}
    return {name for name in names if (folder / name).exists()}


def _shards(folder: Path) -> set[str]:
    """As PyTorch's own reader finds them; none where it does not."""
    try:
        metadata: Any = FileSystemReader(folder).read_metadata()
        return {info.relative_path for info in metadata.storage_data.values()}
    except Exception:  # whatever damaged bytes happen to mean
        return set()


def _cut(path: Path, rng: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(len(data) or 1)])


def _flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes() or b"\0")
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def _delete(path: Path, rng: random.Random) -> None:
    path.unlink()


_DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "cut": _cut,
    "flip": _flip,
    "delete": _delete,
}


def _exchange(one: Path, other: Path) -> None:
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
