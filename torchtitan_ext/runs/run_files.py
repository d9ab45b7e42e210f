"""Files of a run's dump folder, and the lock that lets only one run write there."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from filelock import FileLock, Timeout

from amo_dist.schedule.plan import PLAN_FILE, Plan
from torchtitan_ext.runs import files
from torchtitan_ext.runs.records import METRICS_FILE, append_records, drop_from, read_records
from torchtitan_ext.runs.stores import is_remote, join, store_of

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

VALIDATION = "validation_loss"
"""Field by which a record of ``metrics.jsonl`` is a validation after a step, not a logged step."""
RUN_FILE = "run.json"
"""The config of the run."""
START_FILE = "start.json"
"""Complete config of the latest start by ``amo train``, which its ranks read."""
LOCK_FILE = "lock"
HOLDER_FILE = "lock.holder"
"""Process and host of the run that writes into the folder, for people."""

COMPLETE_FILES = (".metadata", "model.safetensors.index.json")
"""Files that are written last: to torchtitan a checkpoint with one of them is complete."""

LOCK_SECONDS = 120.0
"""Seconds that a rank waits for a lock; the other ranks give this rank up after 300 s or more."""


def require_local(field: str, folder: str) -> None:
    """Check that a folder lies on a file system, where locks, records and resumes look.

    Args:
        field: Field of the config, for the error.
        folder: Its value.

    Raises:
        ValueError: If it is the address of an object store, such as ``s3://``.
    """
    if is_remote(folder):
        raise ValueError(f"{field}: found {folder!r}, expected a folder of a file system")


def lock(folder: Path, seconds: float = LOCK_SECONDS) -> FileLock:
    """Claim a dump folder; the claim ends with the process, or when the result is released.

    Two runs in one folder would mix their checkpoints. This function waits for another run's claim:
    a run that was stopped saves, and a network file system keeps the locks of a dead node for
    minutes.

    Args:
        folder: Existing dump folder.
        seconds: Longest wait.

    Returns:
        The claim. On a file system without locks it holds nothing, and a warning says so.

    Raises:
        ValueError: If another run holds the folder for longer, or its lock cannot be written.
    """
    claim, holder = FileLock(folder / LOCK_FILE, thread_local=False), folder / HOLDER_FILE
    try:
        try:
            claim.acquire(timeout=0)
        except Timeout:
            name = "another process"
            with contextlib.suppress(OSError, ValueError):
                name = files.read_bytes(holder).decode().strip()
            print(f"{folder} is being written by {name}; waiting at most {seconds:.0f} s")
            claim.acquire(timeout=seconds)
        files.replace(holder, f"process {os.getpid()} on {socket.gethostname()}\n")
    except Timeout:
        raise ValueError(
            f"dump_folder: {folder} is being written by {name}; wait for it, end it, or use "
            "another folder"
        ) from None
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise ValueError(f"dump_folder: cannot lock {folder}: {error.strerror}") from None
        logger.warning("%s: its file system has no locks: start no second run in it", folder)
    return claim


def require_unlocked(folder: Path, seconds: float) -> None:
    """Check that no run is writing into a folder, which need not exist.

    Args:
        folder: The dump folder.
        seconds: Longest wait for another run.

    Raises:
        ValueError: If one is.
    """
    if (folder / LOCK_FILE).exists():
        lock(folder, seconds).release()


def read_config(folder: Path) -> dict[str, Any] | None:
    """The config of the run in a dump folder; ``None`` where it holds none.

    Raises:
        ValueError: If its file cannot be read.
    """
    return _read(folder / RUN_FILE, _parse_config)


def _parse_config(text: str) -> dict[str, Any]:
    config = json.loads(text)
    if not isinstance(config, dict):
        raise ValueError(f"found {type(config).__name__}, expected sections")
    return config


def read_plan(folder: Path) -> Plan | None:
    """The latest plan of the run in a dump folder; ``None`` where there is none.

    Raises:
        ValueError: If its file cannot be read.
    """
    return _read(folder / PLAN_FILE, Plan.from_json)


def _read(file: Path, parse: Callable[[str], _T]) -> _T | None:
    try:
        return parse(files.read_bytes(file).decode())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file}: cannot be read: {files.reason(error)}") from None


class RunFiles:
    """Files that one rank writes into the dump folder, which is made where it is missing.

    Args:
        folder: The dump folder.

    Attributes:
        last: Record of the latest logged step.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._saved_plan: Plan | None = None
        self.last: Mapping[str, Any] | None = None

    def start(self, step: int, config: Mapping[str, Any] | None = None) -> None:
        """Drop records that earlier starts wrote from ``step`` on.

        Args:
            step: First step of this start.
            config: Config of this start, sections of JSON values, which replaces that in
                ``run.json``.
        """
        drop_from(self._folder / METRICS_FILE, step)
        self.last = next(reversed(read_metrics(self._folder).steps), None)
        (self._folder / PLAN_FILE).unlink(missing_ok=True)  # The first log writes it again.
        if config is not None:
            files.replace(self._folder / RUN_FILE, json.dumps(config, indent=1) + "\n")

    def append(self, record: Mapping[str, Any]) -> None:
        """Append the record of a logged step."""
        append_records(self._folder / METRICS_FILE, [record])
        self.last = record

    def append_validation(self, step: int, loss: float) -> None:
        """Append the loss of a validation after ``step``."""
        append_records(self._folder / METRICS_FILE, [{"step": step, VALIDATION: loss}])

    def save_plan(self, plan: Plan | None) -> None:
        """Write the plan, if there is one and it differs from the last one."""
        if plan is not None and plan != self._saved_plan:
            files.replace(self._folder / PLAN_FILE, plan.to_json() + "\n")
            self._saved_plan = plan


class Metrics(NamedTuple):
    """Records of ``metrics.jsonl``.

    Attributes:
        steps: Records of logged steps: numbers, ``None`` for those that were not finite, a phase
            (empty if unknown), and numbers by name under ``num_steps_by_type`` and ``optimizer``.
        validations: ``(step, loss)`` of each validation whose loss is a number.
    """

    steps: list[dict[str, Any]]
    validations: list[tuple[int, float]]


def read_metrics(folder: Path) -> Metrics:
    """The metrics of the run in a dump folder; none where it has logged nothing.

    Raises:
        ValueError: The file cannot be read, or a line is no record with a step.
    """
    metrics = Metrics([], [])
    for number, record in enumerate(read_records(folder / METRICS_FILE), start=1):
        if not isinstance(record.get("step"), int):
            raise ValueError(f"{folder / METRICS_FILE}, line {number}: found no step, expected one")
        if VALIDATION not in record:
            metrics.steps.append(_DEFAULTS | record)
        elif record[VALIDATION] is not None:
            metrics.validations.append((record["step"], record[VALIDATION]))
    return metrics


_DEFAULTS: dict[str, Any] = {"phase": "", "num_steps_by_type": {}, "optimizer": {}}

# ------------------------------------------------------------------ checkpoints


def checkpoint_step(name: str) -> int | None:
    """The step of ``step-<n>``; ``None`` for another name."""
    match = re.fullmatch(r"step-(\d+)", name)
    return int(match[1]) if match else None


def checkpoints(folder: object) -> list[int]:
    """The steps of the checkpoints in a folder, in order; those that were cut short included."""
    store = store_of(folder)
    names = store.ls("", detail=False) if store.isdir("") else []
    return sorted(step for step in map(checkpoint_step, names) if step is not None)


def is_complete(checkpoint: object) -> bool:
    """Whether a checkpoint holds what is written last; one without was cut short."""
    return any(map(store_of(checkpoint).isfile, COMPLETE_FILES))


def complete_steps(folder: object) -> list[int]:
    """The steps of the complete checkpoints in a folder, in order."""
    return [step for step in checkpoints(folder) if is_complete(join(folder, f"step-{step}"))]


def find_checkpoint(path: Path) -> Path:
    """A checkpoint, or the newest complete one of a run.

    Args:
        path: ``step-<n>``, the folder of several, or a dump folder.

    Raises:
        ValueError: If there is none, or several folders hold some.
    """
    if checkpoint_step(path.name) is not None or is_complete(path):
        return path
    # A run's folder of checkpoints may have any name.
    folders = [folder for folder in (path, *sorted(path.glob("*/"))) if complete_steps(folder)]
    if len(folders) != 1:
        names = " and ".join(map(str, folders))
        raise ValueError(
            f"checkpoint: found {names or f'no complete one in {path}'}, expected step-<n>, or one "
            "folder of a run that has saved"
        )
    return folders[0] / f"step-{max(complete_steps(folders[0]))}"
