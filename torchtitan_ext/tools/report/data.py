"""What a report reads of a run: its metrics, its plan and its geometry log."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from amo_dist.config import sort_operator_types
from amo_dist.schedule.budget import ns_step_flops
from amo_dist.schedule.grouping import group_matrices
from amo_dist.schedule.plan import Plan
from amo_dist.schedule.types import MatrixInfo
from amo_dist.tools.records import METRICS_FILE, read_records
from torchtitan_ext.runs import costs
from torchtitan_ext.runs.costs import Records
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
    """Of ``geometry.jsonl``, by step; empty where tracking was off."""
    config: Mapping[str, Any]
    """The job config, where the run's folder holds one."""

    @property
    def operator_types(self) -> tuple[str, ...]:
        """All that the files name, in the declared order."""
        named = {name for record in self.metrics for name in record["num_steps_by_type"]}
        return sort_operator_types(named | {record["operator_type"] for record in self.geometry})

    def series(self, name: str) -> list[tuple[int, float]]:
        """``(step, value)`` of a figure of the run or of its optimizer, where it is a number."""
        return costs.series([{**r["optimizer"], **r} for r in self.metrics], name)

    def spans(self, field: str, name: str = "") -> list[tuple[Any, int, int]]:
        """``(value, first step, last step)`` of each stretch of one value, in order.

        Args:
            field: ``phase`` or ``num_steps_by_type``; nothing is told of steps without one.
            name: Of one entry of ``num_steps_by_type``.
        """

        def value(change: Mapping[str, Any]) -> Any:
            return change[field].get(name) if name else change[field]

        changes: list[Mapping[str, Any]] = []
        before = 0
        for record in self.metrics:
            # A run of before tells no changes: each was somewhere since the record before.
            changes += record.get("changes", [{**record, "step": before + 1}])
            before = record["step"]
        stretches = [next(same) for _, same in itertools.groupby(changes, value)]
        ends = [*(one["step"] - 1 for one in stretches[1:]), before]
        found = zip(map(value, stretches), (one["step"] for one in stretches), ends, strict=True)
        return [span for span in found if span[0]]


def load(folders: Iterable[str | Path]) -> list[Run]:
    """Read runs.

    Args:
        folders: Dump folders.

    Raises:
        ValueError: A folder holds no metrics, or a file is malformed.
    """
    paths = [Path(folder) for folder in folders]
    real = [Path(os.path.realpath(path)) for path in paths]  # of a loop, too
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
    """The log of a run; none where tracking was off."""
    records = read_records(path)
    kinds: dict[str, Any] = {"step": int, "operator_type": str, "layer": (int, type(None))}
    kinds |= {"kappa": NUMBER, "ns_residual": NUMBER, "update_norm": NUMBER}
    for index, record in enumerate(records, start=1):
        check_fields(f"{path}, line {index}", record, kinds)
    return records


# ---------------------------------------------------------------- statistics


def pearson(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Pearson's r; None for fewer than three pairs, or where one side does not vary."""
    if len(pairs) < 3:
        return None
    try:
        return statistics.correlation([x for x, _ in pairs], [y for _, y in pairs])
    except statistics.StatisticsError:
        return None


def conditioning(records: Records) -> list[tuple[float, float, int]]:
    """``(log10 kappa, normalised residual, layer)`` of each matrix and step that has all three."""
    return [
        (math.log10(record["kappa"]), record["ns_residual"], record["layer"])
        for record in records
        if all(record.get(key) is not None for key in ("kappa", "ns_residual", "layer"))
    ]


def medians(
    records: Records, key: Callable[[Mapping[str, Any]], Any], name: str = "kappa"
) -> dict[Any, list[tuple[int, float]]]:
    """``(step, median)`` of a figure over the records of each step, by a key of theirs."""
    values: dict[Any, dict[int, list[float]]] = {}
    for record in records:
        group = key(record)
        if record.get(name) is not None and group is not None:
            values.setdefault(group, {}).setdefault(record["step"], []).append(record[name])
    return {
        group: [(step, statistics.median(found)) for step, found in sorted(by_step.items())]
        for group, by_step in values.items()
    }


def operator_type(record: Mapping[str, Any]) -> Any:
    """Of a record of the geometry log."""
    return record["operator_type"]


def layer(record: Mapping[str, Any]) -> Any:
    """Of a record of the geometry log; None outside of the blocks."""
    return record["layer"]


def between_share(records: Records, key: str) -> float | None:
    """Share of the variance of log10 kappa that lies between groups, averaged over steps.

    The squared correlation ratio: 1 where a group's matrices are alike, 0 where groups are.

    Args:
        records: Of a geometry log.
        key: ``operator_type`` or ``layer``.
    """
    by_step: dict[int, dict[Any, list[float]]] = {}
    for record in records:
        if record.get("kappa") is not None and record.get(key) is not None:
            groups = by_step.setdefault(record["step"], {})
            groups.setdefault(record[key], []).append(math.log10(record["kappa"]))
    shares = []
    for groups in by_step.values():
        values = [value for group in groups.values() for value in group]
        mean = statistics.fmean(values)
        total = sum((value - mean) ** 2 for value in values)
        if total > 0:
            between = sum(len(g) * (statistics.fmean(g) - mean) ** 2 for g in groups.values())
            shares.append(between / total)
    return statistics.fmean(shares) if shares else None


@dataclasses.dataclass(frozen=True, slots=True)
class Depth:
    """Shallow against deep layers of one operator type."""

    num_layers: int
    """Layers in each of the two groups."""
    shallow: list[tuple[int, float]]
    deep: list[tuple[int, float]]
    crossing: int | None
    """First logged step at which the order is another than at the first one."""


def shallow_deep(records: Records, name: str) -> Depth | None:
    """The first three layers against the last three; of fewer than six, halves without overlap.

    Returns:
        None where the type has fewer than two layers in the log.
    """
    records = [r for r in records if r["operator_type"] == name]
    layers = sorted({r["layer"] for r in records if r["layer"] is not None})
    size = min(3, len(layers) // 2)
    if size == 0:
        return None
    side = dict.fromkeys(layers[:size], "shallow") | dict.fromkeys(layers[-size:], "deep")
    found = medians(records, lambda r: side.get(r["layer"]))
    shallow, deep = found.get("shallow", []), found.get("deep", [])
    return Depth(size, shallow, deep, first_crossing(shallow, deep))


def first_crossing(
    left: Sequence[tuple[int, float]], right: Sequence[tuple[int, float]]
) -> int | None:
    """First common step at which two trajectories meet or stand in another order than at first."""
    others = dict(right)
    first = None
    for step, value in left:
        if step not in others:
            continue
        sign = (value > others[step]) - (value < others[step])
        if first is None:
            first = sign
        elif sign != first:
            return step
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """Newton-Schulz work relative to the uniform schedule."""

    steps: list[int]
    """The last step of each stretch of one schedule."""
    ratio: list[float]
    """In each of them."""
    mean: float
    """Over the steps of the run."""
    unit: str
    """``flops``, or ``steps`` where no shapes are known."""


def ns_work(run: Run) -> Work | None:
    """Work of a run's Newton-Schulz steps over that of ``base_steps`` for every type."""
    spans = run.spans("num_steps_by_type")
    if not spans:
        return None
    flops = _flops(run, {name for counts, _, _ in spans for name in counts})
    base = 5 if run.plan is None else run.plan.base_steps
    ratio = []
    for counts, _, _ in spans:
        weight = {name: 1.0 if flops is None else flops[name] for name in counts}
        work = sum(counts[name] * weight[name] for name in counts)
        ratio.append(work / (base * sum(weight.values())))
    lengths = [last - first + 1 for _, first, last in spans]
    mean = costs.mean(zip(lengths, ratio, strict=True))
    assert mean is not None
    unit = "steps" if flops is None else "flops"
    return Work([last for _, _, last in spans], ratio, mean, unit)


def _flops(run: Run, names: Collection[str]) -> dict[str, float] | None:
    """Flops of one Newton-Schulz step of all matrices that share a schedule, by its name.

    Returns:
        None where shapes are unknown, or the matrices of a name.
    """
    flops: dict[str, float] = {}
    if run.plan is not None and run.plan.costs is not None:
        flops = dict(zip(run.plan.operator_types, map(float, run.plan.costs), strict=True))
    else:
        registry = _registry(run)
        by_depth = group_matrices(registry, "layer_group").group_of
        for one in registry:
            rows, columns = one.shape
            # A policy shares schedules by type, by type and depth, or by shape.
            known = (one.operator_type, by_depth[one.name], f"{rows}x{columns}")
            name = next((name for name in known if name in names), one.operator_type)
            flops[name] = flops.get(name, 0.0) + ns_step_flops(rows, columns)
    return flops if set(names) <= flops.keys() else None


def _registry(run: Run) -> list[MatrixInfo]:
    """Every matrix of the geometry log."""
    found = {r["name"]: r for r in run.geometry if "shape" in r}
    return [
        MatrixInfo(name, (r["shape"][0], r["shape"][1]), r["operator_type"])
        for name, r in found.items()
    ]


COSTS: dict[str, tuple[str, float]] = {
    "seconds_per_step": ("step (ms)", 1e3),
    costs.OPTIMIZER_SECONDS: ("optimizer in a step (ms)", 1e3),
    "data_seconds_per_step": ("waits for data in a step (ms)", 1e3),
    "tokens_per_second": ("tokens a second", 1),
    "tflops": ("TFLOP/s of a device", 1),
    "mfu_percent": ("share of its peak, MFU (%)", 1),
    "peak_memory_bytes": ("peak memory (MiB)", 2**-20),
    "observe_seconds": ("an observation (ms)", 1e3),
    "geometry_seconds": ("a tracked step (ms)", 1e3),
}
"""Fields that tell what a run costs, each with its title, and the factor to the title's unit."""


def cost(run: Run) -> dict[str, float | None]:
    """What a run took, by field of :data:`COSTS`; ``None`` where nothing was recorded.

    Medians, but the most of ``peak_memory_bytes``, and of ``data_seconds_per_step`` the mean: steps
    have long waits and none. The first record is left out where there are more: it pays for
    start-up.
    """
    records = costs.without_start(run.metrics)
    medians = {f: costs.median(v for v in costs.values(records, f) if v > 0) for f in COSTS}
    return {
        **medians,
        "data_seconds_per_step": costs.mean_of(run.metrics, "data_seconds_per_step"),
        "peak_memory_bytes": costs.peak_memory(records),
    }


def optimizer_seconds_by_phase(run: Run) -> dict[str, float]:
    """Median seconds of the optimizer's step in each phase."""
    values: dict[str, list[float]] = {}
    for record in costs.without_start(run.metrics):
        if record["phase"] and record.get(costs.OPTIMIZER_SECONDS) is not None:
            values.setdefault(record["phase"], []).append(record[costs.OPTIMIZER_SECONDS])
    return {phase: statistics.median(found) for phase, found in values.items()}
