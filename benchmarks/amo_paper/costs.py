"""What a run took, from the records of its ``metrics.jsonl``: seconds, tokens, memory."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Records = Sequence[Mapping[str, Any]]
"""Records by step."""

OPTIMIZER_SECONDS = "optimizer_seconds_per_step"
"""Field of a record: seconds of the optimizer per step, observation and tracking included."""


def series(records: Records, field: str) -> list[tuple[int, float]]:
    """``(step, value)`` of the records that have a number for a field."""
    return [(r["step"], r[field]) for r in records if r.get(field) is not None]


def values(records: Records, field: str) -> list[float]:
    """The values of a field, of the records that have a number."""
    return [value for _, value in series(records, field)]


def median(numbers: Iterable[float]) -> float | None:
    """The median; ``None`` without numbers."""
    listed = list(numbers)
    return statistics.median(listed) if listed else None


def spans(records: Records) -> list[tuple[int, Mapping[str, Any]]]:
    """Each record after the first, with the number of steps that it covers."""
    return [(b["step"] - a["step"], b) for a, b in itertools.pairwise(records)]


def mean(pairs: Iterable[tuple[int, float]]) -> float | None:
    """The mean of values weighted by numbers of steps; ``None`` without values."""
    listed = list(pairs)
    total = sum(steps for steps, _ in listed)
    return sum(steps * value for steps, value in listed) / total if total else None


def mean_of(records: Records, field: str) -> float | None:
    """The mean of a field over the steps after the first record."""
    return mean((steps, r[field]) for steps, r in spans(records) if r.get(field) is not None)
