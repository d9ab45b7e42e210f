"""The files of a run that a report reads: metrics and plan."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from amo_dist.schedule.plan import Plan
from torchtitan_ext.runs.records import METRICS_FILE
from torchtitan_ext.runs.run_files import read_config, read_metrics, read_plan

Records = Sequence[Mapping[str, Any]]
"""Records by step."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One run's files.

    Attributes:
        label: Path of its folder.
        metrics: The logged steps of ``metrics.jsonl``.
        validations: ``(step, loss)``.
        config: The job config; empty if the run's folder holds none.
    """

    label: str
    metrics: Records
    validations: Sequence[tuple[int, float]]
    plan: Plan | None
    config: Mapping[str, Any]

    def series(self, name: str) -> list[tuple[int, float]]:
        """``(step, value)`` of each record with a number for a figure of the run or optimizer."""
        records = ({**record["optimizer"], **record} for record in self.metrics)
        return [(r["step"], r[name]) for r in records if r.get(name) is not None]

    def spans(self, field: str, name: str = "") -> list[tuple[Any, int, int]]:
        """``(value, first step, last step)`` of each stretch of one value, in order.

        A record stands for the steps since the one before it.

        Args:
            field: ``phase`` or ``num_steps_by_type``; steps without a value are left out.
            name: One operator type of ``num_steps_by_type``; empty for the whole mapping.
        """

        def value(record: Mapping[str, Any]) -> Any:
            return record[field].get(name) if name else record[field]

        spans, last = [], 0
        for logged, records in itertools.groupby(self.metrics, value):
            first, last = last + 1, [record["step"] for record in records][-1]
            if logged:
                spans.append((logged, first, last))
        return spans


def load(folder: str | Path) -> Run:
    """Read one run.

    Raises:
        ValueError: The folder holds no metrics, or a file is malformed.
    """
    folder = Path(folder)
    metrics = read_metrics(folder)
    if not metrics.steps:
        raise ValueError(
            f"{folder}: found no {METRICS_FILE} with a record, expected the dump folder of a run"
        )
    return Run(
        label=str(folder),
        metrics=metrics.steps,
        validations=metrics.validations,
        plan=read_plan(folder),
        config=read_config(folder) or {},
    )
