"""Files that a run writes into its dump folder, and the lock that makes it the only one to."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

METRICS_FILE = "metrics.jsonl"
PLAN_FILE = "plan.json"
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
                f"job.dump_folder: {folder} is being written by process {holder}; wait for it, "
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
    # Beside it first: tools refuse a folder whose file was cut short by a kill.
    scratch = (folder / RUN_FILE).with_suffix(".tmp")
    scratch.write_text(json.dumps(config, indent=1) + "\n")
    scratch.replace(folder / RUN_FILE)


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
        kept = [record for record in read_metrics(self._metrics) if record["step"] < step]
        self._metrics.write_text("".join(json.dumps(record) + "\n" for record in kept))
        self._plan.unlink(missing_ok=True)  # comes back at the first log where there is one
        if config is not None:
            save_config(self._folder, config)

    def append(self, record: Mapping[str, Any]) -> None:
        """Append one record."""
        with self._metrics.open("a") as file:
            file.write(json.dumps(_finite(record), allow_nan=False) + "\n")

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


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a ``metrics.jsonl``; a last line cut short by a kill is left out.

    Raises:
        ValueError: If another line is not a JSON object.
    """
    if not path.exists():
        return []
    lines = path.read_text().splitlines()
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ValueError(f"{path}, line {number}: not JSON: {error}") from None
    return records


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
