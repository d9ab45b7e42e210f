"""What a run took, from the records of its ``metrics.jsonl``: seconds, tokens, memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from torchtitan_ext.tools.report.data import Records

OPTIMIZER_SECONDS = "optimizer_seconds_per_step"
"""Field of a record: seconds of the optimizer per step, observation and tracking included."""


def values(records: Records, field: str) -> list[float]:
    """The values of a field, of the records that have a number."""
    return [r[field] for r in records if r.get(field) is not None]


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
