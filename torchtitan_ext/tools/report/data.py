"""The files of a run that a report reads: metrics, plan and geometry log."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from amo_dist.config import sort_operator_types
from amo_dist.schedule.plan import Plan
from torchtitan_ext.runs import costs
from torchtitan_ext.runs.costs import Records
from torchtitan_ext.runs.records import METRICS_FILE, read_records
from torchtitan_ext.runs.run_files import (
    GEOMETRY_FILE,
    NUMBER,
    check_fields,
    read_config,
    read_metrics,
    read_plan,
)


@dataclasses.dataclass(frozen=True)
class Run:
    """One run's files."""

    label: str
    """Short name, unique in a report."""
    metrics: Records
    """The logged steps of ``metrics.jsonl``."""
    validations: Sequence[tuple[int, float]]
    """``(step, loss)``."""
    plan: Plan | None
    geometry: Records
    """Records of ``geometry.jsonl``, by step; empty if tracking was off."""
    config: Mapping[str, Any]
    """The job config; empty if the run's folder holds none."""

    @property
    def operator_types(self) -> tuple[str, ...]:
        """All operator types that the files name, in the declared order."""
        named = {name for record in self.metrics for name in record["num_steps_by_type"]}
        return sort_operator_types(named | {record["operator_type"] for record in self.geometry})

    def series(self, name: str) -> list[tuple[int, float]]:
        """``(step, value)`` of each record with a number for a figure of the run or optimizer."""
        return costs.series([{**r["optimizer"], **r} for r in self.metrics], name)

    def spans(self, field: str, name: str = "") -> list[tuple[Any, int, int]]:
        """``(value, first step, last step)`` of each stretch of one value, in order.

        Args:
            field: ``phase`` or ``num_steps_by_type``; steps without a value are left out.
            name: One operator type of ``num_steps_by_type``; empty for the whole mapping.
        """

        def value(change: Mapping[str, Any]) -> Any:
            return change[field].get(name) if name else change[field]

        changes: list[Mapping[str, Any]] = []
        before = 0
        for record in self.metrics:
            changes += (
                record["changes"] if "changes" in record else [{**record, "step": before + 1}]
            )
            before = record["step"]
        stretches = [next(same) for _, same in itertools.groupby(changes, value)]
        firsts = [stretch["step"] for stretch in stretches]
        lasts = [*(first - 1 for first in firsts[1:]), before]
        spans = zip(map(value, stretches), firsts, lasts, strict=True)
        return [span for span in spans if span[0]]


def load(folders: Iterable[str | Path]) -> list[Run]:
    """Read runs.

    Args:
        folders: Dump folders.

    Raises:
        ValueError: A folder holds no metrics, or a file is malformed.
    """
    paths = [Path(folder) for folder in folders]
    # realpath, unlike Path.resolve, does not raise for a loop of links.
    real = [Path(os.path.realpath(path)) for path in paths]
    labels = [path.name for path in real]
    if len(set(labels)) < len(labels):
        labels = ["/".join(path.parts[-2:]) for path in real]
    if len(set(labels)) < len(labels):
        raise ValueError(f"RUN: found {', '.join(labels)}, expected each run once")
    return [load_one(path, label) for path, label in zip(paths, labels, strict=True)]


def load_one(folder: Path, label: str | None = None) -> Run:
    """Read one run.

    Raises:
        ValueError: The folder holds no metrics, or a file is malformed.
    """
    metrics = read_metrics(folder)
    if not metrics.steps:
        raise ValueError(
            f"{folder}: found no {METRICS_FILE} with a record, expected the dump folder of a run"
        )
    return Run(
        label=label or Path(os.path.realpath(folder)).name,
        metrics=metrics.steps,
        validations=metrics.validations,
        plan=read_plan(folder),
        geometry=_geometry(folder / GEOMETRY_FILE),
        config=read_config(folder) or {},
    )


def _geometry(path: Path) -> Records:
    """The geometry log of a run; empty if tracking was off."""
    records = read_records(path)
    kinds: dict[str, Any] = {"step": int, "operator_type": str, "layer": (int, type(None))}
    kinds |= {"kappa": NUMBER, "ns_residual": NUMBER, "update_norm": NUMBER}
    for index, record in enumerate(records, start=1):
        check_fields(f"{path}, line {index}", record, kinds)
    return records


# ---------------------------------------------------------------- statistics


def conditioning(records: Records) -> list[tuple[float, float, int]]:
    """``(log10 kappa, normalised residual, layer)`` of each record that has all three."""
    return [
        (math.log10(record["kappa"]), record["ns_residual"], record["layer"])
        for record in records
        if all(record.get(key) is not None for key in ("kappa", "ns_residual", "layer"))
    ]


def medians(
    records: Records, key: Callable[[Mapping[str, Any]], Any], name: str = "kappa"
) -> dict[Any, list[tuple[int, float]]]:
    """``(step, median over the step's records)`` of a figure, by a key of the records."""
    values: dict[Any, dict[int, list[float]]] = {}
    for record in records:
        group = key(record)
        if record.get(name) is not None and group is not None:
            values.setdefault(group, {}).setdefault(record["step"], []).append(record[name])
    return {
        group: [(step, statistics.median(figures)) for step, figures in sorted(by_step.items())]
        for group, by_step in values.items()
    }


def operator_type(record: Mapping[str, Any]) -> Any:
    """Operator type of a record of the geometry log."""
    return record["operator_type"]


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """Newton-Schulz work relative to the uniform schedule."""

    steps: list[int]
    """Last step of each stretch of one schedule."""
    ratio: list[float]
    """Work in each stretch, divided by that of the uniform schedule."""
    mean: float
    """Mean ratio over the steps of the run."""
    unit: str
    """``flops``, or ``steps`` without a plan that knows its matrices."""


def ns_work(run: Run) -> Work | None:
    """Work of a run's Newton-Schulz steps, relative to ``base_steps`` for every type."""
    spans = run.spans("num_steps_by_type")
    if not spans:
        return None
    base = 5 if run.plan is None else run.plan.base_steps
    flops: dict[str, float] = {}
    if run.plan is not None and run.plan.costs is not None:
        flops = dict(zip(run.plan.operator_types, map(float, run.plan.costs), strict=True))
    # Schedules of a run can have other groups than its plan.
    is_known = {name for counts, _, _ in spans for name in counts} <= flops.keys()
    ratio = []
    for counts, _, _ in spans:
        weight = {name: flops[name] if is_known else 1.0 for name in counts}
        work = sum(counts[name] * weight[name] for name in counts)
        ratio.append(work / (base * sum(weight.values())))
    lengths = [last - first + 1 for _, first, last in spans]
    mean = costs.mean(zip(lengths, ratio, strict=True))
    assert mean is not None
    unit = "flops" if is_known else "steps"
    return Work([last for _, _, last in spans], ratio, mean, unit)
