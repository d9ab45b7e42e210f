"""Files of a run's dump folder, and the lock that lets only one run write there."""

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

from amo_dist.schedule.fields import fail, read_file, show
from amo_dist.schedule.plan import PLAN_FILE, Plan
from torchtitan_ext.runs import files
from torchtitan_ext.runs.records import METRICS_FILE, MOST_RECORDS, append_records, drop_from
from torchtitan_ext.tools.command import printable, read_json_file

GEOMETRY_FILE = "geometry.jsonl"
VALIDATION = "validation_loss"
"""Field by which a record of ``metrics.jsonl`` is a validation after a step, not a logged step."""
RUN_FILE = "run.json"
"""The config of the run."""
START_FILE = "start.json"
"""Complete config of the latest start by ``amo train``, which its ranks read."""
LOCK_FILE = "lock"
_SECTIONS = ("model", "optimizer", "training", "checkpoint", "tokenizer")
"""Sections that tools read."""

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
    if "://" in folder:
        raise ValueError(f"{field}: found {folder!r}, expected a folder of a file system")


def lock(folder: Path, seconds: float = LOCK_SECONDS, *, reads: bool = False) -> TextIO:
    """Claim a dump folder; the claim ends with the process, or when the result is closed.

    Two runs in one folder would mix their checkpoints. Forked processes, which read data ahead and
    may end later, do not share the claim. This function waits for a claim from another host: a
    network file system keeps the locks of a dead node for minutes, and a run that was stopped
    saves.

    Args:
        folder: Existing dump folder.
        seconds: Longest wait.
        reads: Take a shared lock; do not write process id and host.

    Returns:
        The open lock file, which holds process id and host.

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
    start, num_lines = time.monotonic(), 0
    while not _claim(file, fcntl.LOCK_SH if reads else fcntl.LOCK_EX):
        # The file is opened anew: a network file system may show old content of an open one.
        holder = printable(read_file(folder / LOCK_FILE).decode(errors="replace").strip())
        line = f"{folder} is being written by process {holder}"
        waited = time.monotonic() - start
        is_alive = _is_alive_on_host(holder)
        if is_alive or waited >= seconds:
            file.close()
            raise ValueError(
                f"dump_folder: {line}; wait for it, end it, or use another folder"
                if is_alive
                else f"dump_folder: {line}, after {waited:.0f} s; end it there, or use another "
                "folder; where that host is dead, its file system frees the lock in a while"
            )
        if waited >= 30 * num_lines:
            num_lines += 1
            print(f"{line}; waiting for it, at most {seconds:.0f} s", flush=True)
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
    """Take the lock; True also on a file system without locks, which guards nothing."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EAGAIN, errno.EACCES)
    return True


def _is_alive_on_host(holder: str) -> bool:
    """Whether ``<process id> on <host>`` is a live process of this host."""
    process, _, host = holder.partition(" on ")
    if host != socket.gethostname() or not process.isdecimal():
        return False
    try:
        os.kill(int(process), 0)
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
        seconds: Longest wait for a run on another host.

    Raises:
        ValueError: If one is.
    """
    if (folder / LOCK_FILE).exists():
        lock(folder, seconds, reads=True).close()


def save_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write the config of a run into its dump folder.

    Args:
        folder: Existing dump folder.
        config: Sections of fields, JSON values.
    """
    files.replace(folder / RUN_FILE, json.dumps(config, indent=1) + "\n")


def read_config(folder: Path) -> dict[str, Any] | None:
    """The config of the run in a dump folder; ``None`` where it holds none.

    Raises:
        ValueError: If its file cannot be read.
    """
    file = folder / RUN_FILE
    if not file.exists():
        return None
    sections = read_json_file(file)
    if not isinstance(sections, dict):
        kind = type(sections).__name__
        raise ValueError(f"{file}: found {kind}, expected an object of sections")
    check_fields(str(file), sections, {key: (dict, type(None)) for key in _SECTIONS})
    return sections


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
        """Drop records that earlier starts wrote from ``step`` on.

        Args:
            step: First step of this start.
            config: Config of this start, which replaces that in ``run.json``.
        """
        drop_from(self._metrics, step)
        self.last = next(reversed(read_metrics(self._folder).steps), None)
        self._plan.unlink(missing_ok=True)  # The first log writes a plan again, if there is one.
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
        """Write the plan, and return whether it differs from the last one."""
        if plan == self._saved_plan:
            return False
        files.replace(self._plan, plan + "\n")
        self._saved_plan = plan
        return True

    def close(self) -> None:
        """Release the folder."""
        self._lock.close()


class Metrics(NamedTuple):
    """Records of ``metrics.jsonl``."""

    steps: list[dict[str, Any]]
    """Records of logged steps.

    A record has a step, a phase (empty if unknown), ``num_steps_by_type`` and ``optimizer``; its
    other fields are numbers or ``None``.
    """
    validations: list[tuple[int, float]]
    """``(step, loss)`` of each validation whose loss is a number."""


class MetricsReader:
    """The metrics of a run that goes on; each read parses only lines that are new.

    Args:
        folder: The dump folder.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / METRICS_FILE
        self._restart()

    def _restart(self) -> None:
        self._metrics = Metrics([], [])
        self._num_bytes = self._num_lines = self._inode = 0

    def read(self) -> Metrics:
        """All metrics so far; none where the run has logged nothing.

        A last line that is cut short, by a kill or by a write under way, is left for the next read.

        Raises:
            ValueError: The file cannot be read, a line is not a JSON object, or a field is of
                another type.
        """
        try:
            data = None
            while data is None or self._path.stat().st_ino != self._inode:
                status = self._path.stat()
                # A start that resumes replaces the file, without the steps that it trains again.
                if status.st_ino != self._inode or status.st_size < self._num_bytes:
                    self._restart()
                self._inode = status.st_ino
                data = read_file(self._path, MOST_RECORDS, self._num_bytes)
        except FileNotFoundError:
            self._restart()
            return self._metrics
        except OSError as error:
            raise ValueError(f"{self._path}: cannot be read: {error.strerror}") from None
        *lines, cut_line = data.split(b"\n")
        for line in lines:
            self._num_lines += 1
            self._add(f"{self._path}, line {self._num_lines}", line)
        self._num_bytes += len(data) - len(cut_line)
        return self._metrics

    def _add(self, place: str, line: bytes) -> None:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:  # of JSON, and of UTF-8
            raise ValueError(f"{place}: not JSON: {error}") from None
        if not isinstance(record, dict):
            raise ValueError(f"{place}: found {show(record)}, expected an object")
        _check_record(place, record)
        if VALIDATION not in record:
            self._metrics.steps.append(record)
        elif record[VALIDATION] is not None:
            self._metrics.validations.append((record["step"], record[VALIDATION]))


def read_metrics(folder: Path) -> Metrics:
    """The metrics of the run in a dump folder; none where it has logged nothing.

    Raises:
        ValueError: The file cannot be read, or a line is no such record.
    """
    return MetricsReader(folder).read()


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
    path_by_step = {checkpoint_step(path): path for path in folder.glob("step-*")}
    steps = sorted(step for step in path_by_step if step is not None)
    return {step: path_by_step[step] for step in steps}


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
    for parent in (folder, path):
        if steps := complete_steps(parent):
            return parent / f"step-{max(steps)}"
    raise ValueError(
        f"checkpoint: found no complete one in {path}, expected step-<n> or the dump folder of a "
        "run that has saved"
    )
