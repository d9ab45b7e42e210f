"""Records of a run: files of one JSON object per line, such as ``metrics.jsonl``, and settings."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torchtitan_ext.runs import files

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """The fields that differ, sorted, as readable text."""
    return [
        f"{name}: was {saved.get(name)!r}, is {current.get(name)!r}"
        for name in sorted({*saved, *current})
        if saved.get(name) != current.get(name)
    ]


def read_records(path: Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines; a missing file has no records.

    A last line cut short by a kill is left out. Record ``i`` is line ``i + 1``.

    Raises:
        ValueError: The file cannot be read, or another line is not a JSON object.
    """
    records = []
    for number, line in enumerate(_lines(path), start=1):
        record = _parsed(line)
        if record is None:
            raise ValueError(f"{path}, line {number}: found {line[:80]!r}, expected a JSON object")
        records.append(record)
    return records


def append_records(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append records to a file of JSON lines; numbers that are not finite become ``null``."""
    text = "".join(json.dumps(_finite(record), allow_nan=False) + "\n" for record in records)
    with path.open("a") as file:
        file.write(text)


def drop_from(path: Path, step: int) -> None:
    """Drop the records from ``step`` on from a file of JSON lines; create a missing file.

    Lines that cannot be read are dropped with a warning, as training does not depend on them.

    Raises:
        ValueError: The file cannot be read.
    """
    records = [_parsed(line) for line in _lines(path)]
    if num_damaged := records.count(None):
        logger.warning("%s: dropped %d lines that cannot be read", path, num_damaged)
    kept = [r for r in records if r and isinstance(r.get("step"), int) and r["step"] < step]
    if num_dropped := len(records) - num_damaged - len(kept):
        # A start that goes on repeats some steps; one that keeps nothing may be in a wrong folder.
        level = logging.INFO if kept else logging.WARNING
        logger.log(level, "%s: dropped %d records from step %d on", path, num_dropped, step)
    files.replace(path, "".join(json.dumps(record) + "\n" for record in kept))


def _lines(path: Path) -> list[bytes]:
    try:
        return files.read_bytes(path).split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # of JSON, of UTF-8, and of deep nesting
        return None
    return record if isinstance(record, dict) else None


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
