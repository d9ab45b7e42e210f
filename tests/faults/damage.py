"""Saves that fail, damage to the newest checkpoint, and the resume that must follow."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

SAVE_POINTS = ("in_save", "before_metadata", "before_checksums")
KINDS = ("cut", "flip", "delete")
METADATA, CHECKSUMS = ".metadata", "checksums.json"


def step_of(folder: Path) -> int:
    """From the name of a checkpoint's folder."""
    return int(folder.name.removeprefix("step-"))


def die(*_: Any, **__: Any) -> None:
    """As by an operator, or for want of memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def fail_in_save(step: int, point: str) -> None:
    """Have this rank killed at one of `SAVE_POINTS` of a step, or find the ``disk_full`` there."""
    name = "write_data" if point in ("in_save", "disk_full") else "finish"
    stock = getattr(dcp.FileSystemWriter, name)

    def method(writer: dcp.FileSystemWriter, *args: Any, **kwargs: Any) -> Any:
        is_now = step_of(Path(writer.path)) == step
        if is_now and point == "disk_full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if is_now and point == "before_metadata":
            die()
        result = stock(writer, *args, **kwargs)
        if is_now:
            die()
        return result

    setattr(dcp.FileSystemWriter, name, method)


class Ledger:
    """Knows which checkpoints of a folder are whole."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._damaged: dict[Path, int] = {}  # the time of the damage: a later write mends it

    def complete(self) -> dict[int, Path]:
        """Checkpoints with metadata by step, the newest first."""
        folders = (path.parent for path in self._folder.glob(f"step-*/{METADATA}"))
        return dict(sorted(((step_of(path), path) for path in folders), reverse=True))

    def counted(self, folder: Path) -> set[str]:
        """Names of the files of a checkpoint; none before its checksums are written.

        A smaller world that writes over a checkpoint leaves files behind, which do not count.
        """
        sums = folder / CHECKSUMS
        return {*json.loads(sums.read_bytes())} if sums.exists() else set()

    def damaged(self, folder: Path) -> set[str]:
        """Names of the files of a checkpoint that are not as they were written."""
        counted = self.counted(folder)
        return {
            path.name
            for path, stamp in self._damaged.items()
            if path.parent == folder
            and (path.name in counted or not counted)
            and (not path.exists() or path.stat().st_mtime_ns == stamp)
        }

    def harm(self, rng: random.Random, kind: str) -> str:
        """Damages a file of the newest complete checkpoint; returns the event, or nothing."""
        complete = self.complete()
        folder = next(iter(complete.values()), self._folder)
        names = self.counted(folder) - self.damaged(folder)
        if not names:  # all are damaged, or a kill came before the checksums were written
            return ""
        path = folder / rng.choice(sorted(names))
        data = bytearray(path.read_bytes())
        place = rng.randrange(len(data))
        if kind == "delete":
            path.unlink()
        elif kind == "cut":
            path.write_bytes(data[:place])
        else:
            data[place] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
        self._damaged[path] = path.stat().st_mtime_ns if path.exists() else 0
        return f"{kind} {path.suffix}"

    def expected(self) -> tuple[int, dict[int, set[str]]]:
        """The step that a resume must go on from, and the damaged files of each later one."""
        named: dict[int, set[str]] = {}
        for step, folder in self.complete().items():
            if not (names := self.damaged(folder)):
                return step, named
            named[step] = names
        return 0, named
