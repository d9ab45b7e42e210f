"""Files that a run writes into its dump folder, and the lock that makes it the only one to."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from amo_dist.tools.plan_source import PLAN_FILE

METRICS_FILE = "metrics.jsonl"
GEOMETRY_FILE = "geometry.jsonl"
RUN_FILE = "run.json"
"""The config of the run."""
LOCK_FILE = "lock"

COMPLETE_FILES = (".metadata", "model.safetensors.index.json")
"""Files that are written last: torchtitan takes a checkpoint for complete that has one of them."""


def lock(folder: Path) -> TextIO:
    """Claim a dump folder; the claim ends with the process, or when the result is closed.

    Two runs in one folder would mix their checkpoints.

    Args:
        folder: Exists.

    Returns:
        The open lock file, which holds the process's number.

    Raises:
        ValueError: If another process holds the folder.
    """
    file = (folder / LOCK_FILE).open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        holder = file.read().strip()
        if error.errno in (errno.EAGAIN, errno.EACCES):
            file.close()
            raise ValueError(
                f"dump_folder: {folder} is being written by process {holder}; wait for it, "
                "end it, or use another folder"
            ) from None
        # Some network file systems know no locks: then there is no guard.
    file.seek(0)
    file.truncate()
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def require_unlocked(folder: Path) -> None:
    """Check that no run is writing into a folder, which need not exist.

    Raises:
        ValueError: If one is.
    """
    if (folder / LOCK_FILE).exists():
        with contextlib.closing(lock(folder)):
            pass


def save_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write the config of a run into its dump folder.

    Args:
        folder: Exists.
        config: Sections of fields, JSON values.
    """
    _replace(folder / RUN_FILE, json.dumps(config, indent=1) + "\n")


def read_config(folder: Path) -> dict[str, Any] | None:
    """The config of the run in a dump folder; ``None`` where it holds none."""
    file = folder / RUN_FILE
    return json.loads(file.read_text()) if file.is_file() else None


class RunFiles:
    """Files that one rank writes into the dump folder.

    Args:
        folder: The dump folder; made where it is missing, and locked until :meth:`close`.

    Raises:
        ValueError: If another process writes into the folder.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = lock(folder)
        self._folder = folder
        self._metrics = folder / METRICS_FILE
        self._plan = folder / PLAN_FILE
        self._saved_plan: str | None = None

    def start(self, step: int, config: Mapping[str, Any] | None = None) -> None:
        """Drop what earlier runs wrote for ``step`` and later ones.

        Args:
            step: The first one to come.
            config: Of this run; takes the place of an earlier start's in ``run.json``.
        """
        drop_from(self._metrics, step)
        self._plan.unlink(missing_ok=True)  # comes back at the first log where there is one
        if config is not None:
            save_config(self._folder, config)

    def append(self, record: Mapping[str, Any]) -> None:
        """Append one record."""
        append_records(self._metrics, [record])

    def save_plan(self, plan: str) -> bool:
        """Write the plan; whether it is new to this object."""
        if plan == self._saved_plan:
            return False
        self._plan.write_text(plan + "\n")
        self._saved_plan = plan
        return True

    def close(self) -> None:
        """Give the folder back."""
        self._lock.close()


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a file of JSON lines, such as ``metrics.jsonl``; none where there is no file.

    A last line cut short by a kill is left out. Record ``i`` stands in line ``i + 1``.

    Raises:
        ValueError: If the file cannot be read, or another line is not a JSON object.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number}: not JSON: {error}") from None
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number}: found {record!r}, expected an object")
        records.append(record)
    return records


def append_records(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append records to a file of JSON lines; ``null`` stands for what is not finite."""
    lines = [json.dumps(_finite(record), allow_nan=False) + "\n" for record in records]
    with path.open("a") as file:
        file.writelines(lines)


def drop_from(path: Path, step: int) -> None:
    """Drop the records of ``step`` and later ones from a file of JSON lines, which is made."""
    kept = [record for record in read_records(path) if record["step"] < step]
    _replace(path, "".join(json.dumps(record) + "\n" for record in kept))


def _replace(path: Path, text: str) -> None:
    # Beside it first: a kill in the midst of a rewrite would lose what took hours, or leave a file
    # that tools refuse.
    scratch = path.with_suffix(".tmp")
    scratch.write_text(text)
    scratch.replace(path)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ------------------------------------------------------------------ checkpoints


def checkpoint_step(checkpoint: Path) -> int | None:
    """The step of ``step-<n>``; ``None`` for a folder of another name."""
    match = re.fullmatch(r"step-(\d+)", checkpoint.name)
    return int(match[1]) if match else None


def checkpoints(folder: Path) -> dict[int, Path]:
    """The checkpoints in a folder by step, in order; those that were cut short included."""
    found = {checkpoint_step(path): path for path in folder.glob("step-*")}
    return {step: found[step] for step in sorted(step for step in found if step is not None)}


def is_complete(checkpoint: Path) -> bool:
    """Whether a checkpoint holds what is written last; one without was cut short."""
    return any((checkpoint / name).is_file() for name in COMPLETE_FILES)


def complete_steps(folder: Path) -> list[int]:
    """The steps of the complete checkpoints in a folder, in order."""
    return [step for step, path in checkpoints(folder).items() if is_complete(path)]
