"""Files of records, one JSON object per line: ``metrics.jsonl`` and the geometry log."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from amo_dist.schedule.fields import read_file, show
from torchtitan_ext.runs import files

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
MOST_RECORDS = 2**31
"""Most bytes of a file of records."""


def read_records(path: Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines, such as ``metrics.jsonl``; a missing file has no records.

    A last line cut short by a kill is left out. Record ``i`` is line ``i + 1``.

    Raises:
        ValueError: The file cannot be read, or another line is not a JSON object.
    """
    records, problems = _parsed(path)
    if problems:
        raise ValueError(problems[0])
    return records


def append_records(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append records to a file of JSON lines; numbers that are not finite become ``null``."""
    files.append_lines(path, [json.dumps(_finite(record), allow_nan=False) for record in records])


def drop_from(path: Path, step: int) -> None:
    """Drop the records from ``step`` on from a file of JSON lines; create a missing file.

    Lines that cannot be read are dropped with a warning, as training does not depend on them. The
    file with them stays as ``<name>.damaged``.

    Raises:
        ValueError: The file cannot be read.
    """
    records, problems = _parsed(path)
    if problems:
        damaged = path.with_name(f"{path.name}.damaged")
        files.replace(damaged, path.read_bytes())
        logger.warning(
            "%s; dropped %d lines that cannot be read; the old file is %s",
            *(problems[0], len(problems), damaged),
        )
    kept = [r for r in records if isinstance(r.get("step"), int) and r["step"] < step]
    files.replace(path, "".join(json.dumps(record) + "\n" for record in kept))


def _parsed(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Parse a file of JSON lines into its records, and a message per line that cannot be read.

    Raises:
        ValueError: The file cannot be read.
    """
    try:
        lines = read_file(path, MOST_RECORDS).split(b"\n")
    except FileNotFoundError:
        return [], []
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    if not lines[-1]:
        lines.pop()
    records: list[dict[str, Any]] = []
    problems: list[str] = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:  # of JSON, and of UTF-8
            if number < len(lines):
                problems.append(f"{path}, line {number}: not JSON: {error}")
            continue
        if isinstance(record, dict):
            records.append(record)
        else:
            problems.append(f"{path}, line {number}: found {show(record)}, expected an object")
    return records, problems


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
