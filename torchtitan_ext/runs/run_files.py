"""Files that a run writes into its dump folder, and the lock that makes it the only one to."""

from __future__ import annotations

import errno
import fcntl
import functools
import json
import os
import re
import socket
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from amo_dist.schedule.fields import fail, read_file
from amo_dist.schedule.plan import PLAN_FILE, Plan
from amo_dist.tools import files
from amo_dist.tools.command import printable
from amo_dist.tools.records import METRICS_FILE, append_records, drop_from, read_records

GEOMETRY_FILE = "geometry.jsonl"
VALIDATION = "validation_loss"
"""Field of a record of ``metrics.jsonl`` that is no logged step, but a validation after one."""
RUN_FILE = "run.json"
"""The config of the run."""
START_FILE = "start.json"
"""Complete config of the latest start by ``amo train``, which its ranks read."""
LOCK_FILE = "lock"
_SECTIONS = ("model", "optimizer", "training", "checkpoint", "tokenizer")
"""Sections that tools read."""

COMPLETE_FILES = (".metadata", "model.safetensors.index.json")
"""Files that are written last: torchtitan takes a checkpoint for complete that has one of them."""


LOCK_SECONDS = 120.0
"""Seconds that a rank waits for a lock; the others wait for that rank for 300 s or more."""


def lock(folder: Path, seconds: float = LOCK_SECONDS, *, reads: bool = False) -> TextIO:
    """Claim a dump folder; the claim ends with the process, or when the result is closed.

    Two runs in one folder would mix their checkpoints. Forked processes, which read data ahead and
    may end later, do not share the claim. A claim from another host is waited for: it may be that
    of a node that is dead, whose locks a file system of a network keeps for minutes, or of a run
    that was told to stop and saves.

    Args:
        folder: Exists.
        seconds: The longest wait.
        reads: Take a shared lock; do not write pid and host.

    Returns:
        The open lock file, which holds the process's number and host.

    Raises:
        ValueError: If a live process of this host holds the folder, another host holds it for
            longer than ``seconds``, or its lock cannot be written.
    """
    try:
        file = (folder / LOCK_FILE).open("a+")
    except OSError as error:
        raise ValueError(
            f"dump_folder: cannot write {folder / LOCK_FILE}: {error.strerror}"
        ) from None
    start, lines = time.monotonic(), 0
    while not _claim(file, fcntl.LOCK_SH if reads else fcntl.LOCK_EX):
        # Opened anew: a network's file system may hold an older content for an open file.
        holder = printable(read_file(folder / LOCK_FILE).decode(errors="replace").strip())
        state = f"{folder} is being written by process {holder}"
        waited = time.monotonic() - start
        is_here = _is_alive_here(holder)
        if is_here or waited >= seconds:
            file.close()
            raise ValueError(
                f"dump_folder: {state}; wait for it, end it, or use another folder"
                if is_here
                else f"dump_folder: {state}, after {waited:.0f} s; end it there, or use another "
                "folder; where that host is dead, its file system frees the lock in a while"
            )
        if waited >= 30 * lines:
            lines += 1
            print(f"{state}; waiting for it, at most {seconds:.0f} s", flush=True)
        time.sleep(min(1.0, seconds))
    if reads:
        return file
    file.seek(0)
    file.truncate()
    file.write(f"{os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    os.register_at_fork(after_in_child=functools.partial(_let_go, weakref.ref(file)))
    return file


def _claim(file: TextIO, kind: int) -> bool:
    """Whether the lock is ours, or the file system knows no locks: then there is no guard."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EAGAIN, errno.EACCES)
    return True


def _is_alive_here(holder: str) -> bool:
    """Whether ``<number> on <host>`` is a process of this machine."""
    number, _, host = holder.partition(" on ")
    if host != socket.gethostname() or not number.isdecimal():
        return False
    try:
        os.kill(int(number), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _let_go(reference: weakref.ref[TextIO]) -> None:
    file = reference()
    if file is not None:
        file.close()


def require_unlocked(folder: Path, seconds: float) -> None:
    """Check that no run is writing into a folder, which need not exist.

    Args:
        folder: The dump folder.
        seconds: How long to wait for a run on another host.

    Raises:
        ValueError: If one is.
    """
    if (folder / LOCK_FILE).exists():
        lock(folder, seconds, reads=True).close()


def save_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write the config of a run into its dump folder.

    Args:
        folder: Exists.
        config: Sections of fields, JSON values.
    """
    files.replace(folder / RUN_FILE, json.dumps(config, indent=1) + "\n")


def read_config(folder: Path) -> dict[str, Any] | None:
    """The config of the run in a dump folder; ``None`` where it holds none.

    Raises:
        ValueError: If its file cannot be read.
    """
    file = folder / RUN_FILE
    try:
        config = json.loads(read_file(file))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file}: found {type(config).__name__}, expected an object of sections")
    check_fields(str(file), config, {key: (dict, type(None)) for key in _SECTIONS})
    return config


def read_plan(folder: Path) -> Plan | None:
    """The latest plan of the run in a dump folder; ``None`` where there is none.

    Raises:
        ValueError: If its file cannot be read.
    """
    file = folder / PLAN_FILE
    try:
        return Plan.from_json(read_file(file).decode())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


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
        self.last: Mapping[str, Any] | None = None
        """The record of the latest logged step."""

    def start(self, step: int, config: Mapping[str, Any] | None = None) -> None:
        """Drop what earlier runs wrote for ``step`` and later ones.

        Args:
            step: The first one to come.
            config: Config of this run; takes the place of an earlier start's in ``run.json``.
        """
        drop_from(self._metrics, step)
        self.last = next(reversed(read_metrics(self._folder).steps), None)
        self._plan.unlink(missing_ok=True)  # comes back at the first log where there is one
        if config is not None:
            save_config(self._folder, config)

    def append(self, record: Mapping[str, Any]) -> None:
        """Append the record of a logged step."""
        append_records(self._metrics, [record])
        self.last = record

    def append_validation(self, step: int, loss: float) -> None:
        """Append the loss of a validation after ``step``."""
        append_records(self._metrics, [{"step": step, VALIDATION: loss}])

    def save_plan(self, plan: str) -> bool:
        """Write the plan; whether it is new to this object."""
        if plan == self._saved_plan:
            return False
        files.replace(self._plan, plan + "\n")
        self._saved_plan = plan
        return True

    def close(self) -> None:
        """Give the folder back."""
        self._lock.close()


class Metrics(NamedTuple):
    """What ``metrics.jsonl`` holds."""

    steps: list[dict[str, Any]]
    """A record of each logged step.

    Each has a step, a phase (empty if unknown), ``num_steps_by_type`` and ``optimizer``. All else
    is a number or ``None``.
    """
    validations: list[tuple[int, float]]
    """``(step, loss)`` of each validation whose loss is a number."""


def read_metrics(folder: Path) -> Metrics:
    """The metrics of the run in a dump folder; none where it has logged nothing.

    Raises:
        ValueError: The file cannot be read, or a field is of another type.
    """
    path = folder / METRICS_FILE
    records = read_records(path)
    for number, record in enumerate(records, start=1):
        _check_record(f"{path}, line {number}", record)
    losses = [(record["step"], record[VALIDATION]) for record in records if VALIDATION in record]
    return Metrics(
        [record for record in records if VALIDATION not in record],
        [(step, loss) for step, loss in losses if loss is not None],
    )


NUMBER = (int, float, type(None))
"""Types of a number in a record, for `check_fields`; ``None`` is one that was not finite."""

_FIELDS: dict[str, Any] = {"phase": str, "num_steps_by_type": dict, "optimizer": dict}


def _check_record(place: str, record: dict[str, Any]) -> None:
    record.update({key: record.get(key) or kind() for key, kind in _FIELDS.items()})
    kinds: dict[str, Any] = dict.fromkeys(record, NUMBER)
    if "changes" in record:
        kinds["changes"] = list
    check_fields(place, record, kinds | _FIELDS | {"step": int})
    for key in ("num_steps_by_type", "optimizer"):
        check_fields(f"{place}: {key}", record[key], dict.fromkeys(record[key], NUMBER))
    for change in record.get("changes", ()):
        check_fields(place, {"changes": change}, {"changes": dict})
        change_fields = {"step": int, "phase": str, "num_steps_by_type": dict}
        check_fields(f"{place}: changes", change, change_fields)


def check_fields(place: str, record: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    """Check the types of some fields of a record.

    Raises:
        ValueError: One is of another type, or missing where ``None`` is none of its types.
    """
    for key, kind in kinds.items():
        if not isinstance(value := record.get(key), kind):
            kinds_of = kind if isinstance(kind, tuple) else (kind,)
            expected = " or ".join(type_.__name__ for type_ in kinds_of if type_ is not type(None))
            fail(f"{place}: {key}", value, expected)


# ------------------------------------------------------------------ checkpoints


def checkpoint_step(checkpoint: Path) -> int | None:
    """The step of ``step-<n>``; ``None`` for a folder of another name."""
    match = re.fullmatch(r"step-(\d+)", checkpoint.name)
    return int(match[1]) if match else None


def checkpoints(folder: Path) -> dict[int, Path]:
    """The checkpoints in a folder by step, in order; those that were cut short included."""
    by_step = {checkpoint_step(path): path for path in folder.glob("step-*")}
    return {step: by_step[step] for step in sorted(step for step in by_step if step is not None)}


def is_complete(checkpoint: Path) -> bool:
    """Whether a checkpoint holds what is written last; one without was cut short."""
    return any((checkpoint / name).is_file() for name in COMPLETE_FILES)


def complete_steps(folder: Path) -> list[int]:
    """The steps of the complete checkpoints in a folder, in order."""
    return [step for step, path in checkpoints(folder).items() if is_complete(path)]


def find_checkpoint(path: Path) -> Path:
    """A checkpoint, or the newest complete one of a run.

    Args:
        path: ``step-<n>``, the folder of several, or a dump folder.

    Raises:
        ValueError: If there is none.
    """
    if checkpoint_step(path) is not None or is_complete(path):
        return path
    config = read_config(path) or {}
    folder = path / str((config.get("checkpoint") or {}).get("folder", "checkpoint"))
    for candidate in (folder, path):
        if steps := complete_steps(candidate):
            return candidate / f"step-{max(steps)}"
    raise ValueError(
        f"checkpoint: found no complete one in {path}, expected step-<n> or the dump folder of a "
        "run that has saved"
    )
