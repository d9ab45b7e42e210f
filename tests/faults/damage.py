"""Damage to the newest checkpoint of a run, and what of it must be found."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Callable
from pathlib import Path

KINDS = ("cut", "flip", "delete", "swap")
METADATA, CHECKSUMS = ".metadata", "checksums.json"


@dataclasses.dataclass(frozen=True)
class Expected:
    """Of a resume: where it may go on from, and the files of each checkpoint to name as damaged."""

    steps: set[int]
    damaged: dict[int, set[str]]


class Ledger:
    """Knows which checkpoints of a folder are whole.

    Args:
        step_of: The step of a checkpoint's folder, from its name.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stamps: dict[Path, tuple[int, int]] = {}
        self._damaged: dict[int, set[str]] = {}
        self._doubtful: set[int] = set()

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
        for step, folder in self.complete().items():
            if folder / METADATA in changed:  # written once all else is
                self._damaged.pop(step, None)
                self._doubtful.discard(step)
            else:  # one that is written over is incomplete until it is whole again
                assert not any(path.parent == folder for path in changed), folder

    def _read_stamps(self) -> dict[Path, tuple[int, int]]:
        found = [(path, path.stat()) for path in self._folder.glob("step-*/*")]
        return {path: (stat.st_ino, stat.st_mtime_ns) for path, stat in found}

    def harm(self, rng: random.Random, kind: str) -> str:
        """Damage the newest complete checkpoint; returns what was done, empty where nothing was."""
        complete = self.complete()
        if not complete:
            return ""
        step, folder = complete.popitem()
        names = _files(folder)
        if CHECKSUMS not in names and kind in ("flip", "swap"):
            kind = "cut"  # as of old checkpoints: sizes are all that is known
        if kind == "swap":
            steps = [step for step, other in complete.items() if CHECKSUMS in _files(other)]
            others = {step: set(names) & set(_files(complete[step])) for step in steps}
            if not any(others.values()):
                kind = "flip"
            else:
                other = rng.choice([step for step, common in others.items() if common])
                name = rng.choice(sorted(others[other]))
                self._swap(step, folder / name)
                self._swap(other, complete[other] / name)
                _exchange(folder / name, complete[other] / name)
                self._stamps = self._read_stamps()
                return f"swap {_sort(name)}"
        name = rng.choice(names)
        _DAMAGES[kind](folder / name, rng)
        self._note(step, name, kind)
        self._stamps = self._read_stamps()
        return f"{kind} {_sort(name)}"

    def _swap(self, step: int, path: Path) -> None:
        self._note(step, path.name, "swap")

    def _note(self, step: int, name: str, kind: str) -> None:
        if name == METADATA and kind == "delete":
            self._damaged.pop(step, None)  # incomplete, as one cut short
        elif name == CHECKSUMS and kind != "cut":
            self._doubtful.add(step)  # all that is loaded is whole; a note may say less
        else:
            self._damaged.setdefault(step, set()).add(name)

    def expected(self) -> Expected:
        """What a resume may do."""
        steps: set[int] = set()
        damaged: dict[int, set[str]] = {}
        for step in reversed(self.complete()):
            if step in self._damaged:
                damaged[step] = self._damaged[step]
                continue
            steps.add(step)
            if step not in self._doubtful:
                return Expected(steps, damaged)
        return Expected(steps | {0}, damaged)


def names_one(names: set[str], text: str) -> bool:
    """Whether an error names one of these files."""
    return any(re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", text) for name in names)


def step_of(folder: Path) -> int:
    """From the name of a checkpoint's folder."""
    return int(folder.name.removeprefix("step-"))


def _files(folder: Path) -> list[str]:
    """Those that count: a smaller world that wrote over a checkpoint left others behind."""
    try:
        sums = json.loads((folder / CHECKSUMS).read_bytes())
        return [name for name in (*sums, CHECKSUMS) if (folder / name).exists()]
    except (FileNotFoundError, ValueError):
        return [*sorted(path.name for path in folder.glob("*.distcp")), METADATA]


def _sort(name: str) -> str:
    return "shard" if name.endswith(".distcp") else name


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
