"""Files of records, a JSON object a line: ``metrics.jsonl``, and the geometry log."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from amo_dist.schedule.fields import read_file, show
from amo_dist.tools import files

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
MOST_RECORDS = 2**31
"""Bytes that a file of records may hold."""


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a file of JSON lines, such as ``metrics.jsonl``; none where there is no file.

    A last line cut short by a kill is left out. Record ``i`` stands in line ``i + 1``.

    Raises:
        ValueError: If the file cannot be read, or another line is not a JSON object.
    """
    records, problems = _parsed(path)
    if problems:
        raise ValueError(problems[0])
    return records


def append_records(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append records to a file of JSON lines; ``null`` stands for what is not finite."""
    files.append_lines(path, [json.dumps(_finite(one), allow_nan=False) for one in records])


def drop_from(path: Path, step: int) -> None:
    """Drop the records of ``step`` and later ones from a file of JSON lines, which is made.

    Lines that cannot be read are left out with a warning: training does not depend on them. The
    file as it was stays as ``<name>.damaged``.

    Raises:
        ValueError: If the file cannot be read.
    """
    records, problems = _parsed(path)
    if problems:
        damaged = path.with_name(f"{path.name}.damaged")
        files.replace(damaged, path.read_bytes())
        logger.warning(
            "%s; lines that cannot be read are left out (%d), the file as it was is %s",
            *(problems[0], len(problems), damaged),
        )
    kept = [one for one in records if isinstance(one.get("step"), int) and one["step"] < step]
    files.replace(path, "".join(json.dumps(record) + "\n" for record in kept))


def _parsed(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The records of a file of JSON lines, and one line about each that cannot be read.

    Raises:
        ValueError: If the file cannot be read.
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
        except (ValueError, RecursionError) as error:  # JSON's, and that of UTF-8
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
        return {key: _finite(one) for key, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
