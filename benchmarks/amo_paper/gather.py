"""What the runs of an experiment gave, in the form of the paper's table."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from amo_dist.schedule.plan import PLAN_FILE, Plan
from benchmarks.amo_paper import runner
from benchmarks.amo_paper.catalog import Experiment, Row
from benchmarks.amo_paper.resolve import QUICKSTART, ROOT, Job, Place, resolve
from benchmarks.amo_paper.results import SHORT, read_results, sort_tasks
from benchmarks.tables import markdown
from torchtitan_ext.runs.run_files import read_metrics
from torchtitan_ext.tools.report.data import Records

NOTHING = "-"
"""Cell of a number that is not there yet."""


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """A row of the table with what its run gave so far.

    Attributes:
        block: Block of the table.
        label: First cell.
        step: Step of the evaluated checkpoint.
        step_reached: The last logged step up to it.
        loss: Training loss at the step; ``None`` before it is reached.
        ns_steps: Newton-Schulz steps of all operator types together, planned or used at the step.
        tasks: Score by task in percent; empty before the evaluation.
        cost: Means over the logged steps but the first: see ``COSTS``.
    """

    block: str
    label: str
    step: int
    step_reached: int
    loss: float | None
    ns_steps: int | None
    tasks: Mapping[str, float]
    cost: Mapping[str, float | None]

    @property
    def average(self) -> float | None:
        """The unweighted average over the tasks."""
        return statistics.fmean(self.tasks.values()) if self.tasks else None


COSTS = (
    "step (s)",
    "optimizer (ms)",
    "throughput (M tokens/s)",
    "peak memory (GiB)",
    "one observation (s)",
)
"""Columns of the cost table."""


def gather(experiment: Experiment, place: Place) -> list[Found]:
    """Read what is there of an experiment's runs.

    Raises:
        ValueError: A file is malformed.
    """
    found = []
    for row in experiment.rows:
        stand_in = QUICKSTART.stem if place.small else row.run.model
        block = row.block.replace(row.run.model, stand_in)
        found.append(_found(row, block, resolve(row.run, place)))
    return found


def _found(row: Row, block: str, job: Job) -> Found:
    folder = ROOT / job.folder
    step = job.step_of(row.step)
    records = [r for r in read_metrics(folder).steps if r["step"] <= step]
    # A loss is that of the last logged step: 2000 need not be one of them, 120 of 120 always is.
    reached = runner.steps_done(job) >= step
    results = job.results(row.step)
    tasks = read_results([results])[0].tasks if results.exists() else {}
    return Found(
        block=block,
        label=row.label,
        step=step,
        step_reached=records[-1]["step"] if records else 0,
        loss=records[-1]["loss"] if reached else None,
        ns_steps=_ns_steps(folder / PLAN_FILE, records) if reached else None,
        tasks=tasks,
        cost=_cost(records),
    )


def _ns_steps(plan: Path, records: Records) -> int | None:
    if plan.exists():
        return sum(Plan.from_json(plan.read_text()).allocation)
    steps = records[-1].get("num_steps_by_type") if records else None
    return sum(steps.values()) if steps else None


def _cost(records: Records) -> dict[str, float | None]:
    """Means weighted by the steps between records; the first covers compilation and warmup."""
    step, optimizer = (
        _mean_of(records, f) for f in ("seconds_per_step", "optimizer_seconds_per_step")
    )
    memory = max(_values(records, "peak_memory_bytes"), default=None)
    tokens = records[-1]["num_tokens"] / records[-1]["step"] if records else None
    # A record has the seconds of an observation, on its slowest rank, only after one.
    observations = _values(records, "observe_seconds")
    values = (
        step,
        None if optimizer is None else 1e3 * optimizer,
        tokens / step / 1e6 if tokens and step else None,
        memory / 2**30 if memory else None,
        statistics.fmean(observations) if observations else None,
    )
    return dict(zip(COSTS, values, strict=True))


def _values(records: Records, field: str) -> list[float]:
    """The values of a field, of the records that have a number."""
    return [r[field] for r in records if r.get(field) is not None]


def _mean_of(records: Records, field: str) -> float | None:
    """The mean of a field over the steps after the first record."""
    parts = [
        (record["step"] - before["step"], record[field])
        for before, record in itertools.pairwise(records)
        if record.get(field) is not None
    ]
    total = sum(steps for steps, _ in parts)
    return sum(steps * value for steps, value in parts) / total if total else None


def table(experiment: Experiment, found: Sequence[Found]) -> str:
    """The table of an experiment as Markdown, one for each block."""
    if experiment.name == "cost":
        rows = [[f.label, *(_text(f.cost[name], ".4g") for name in COSTS)] for f in found]
        return markdown(["optimizer", *COSTS], rows)
    blocks = dict.fromkeys(f.block for f in found)
    return "\n\n".join(_block(block, [f for f in found if f.block == block]) for block in blocks)


def _block(name: str, rows: Sequence[Found]) -> str:
    tasks = sort_tasks(task for row in rows for task in row.tasks)
    header = ["", "step", "loss", "NS steps", *(SHORT.get(task, task) for task in tasks)]
    averaged = ["Avg"] if tasks else []
    cells = [
        [
            row.label,
            str(row.step) if row.loss is not None else f"{row.step_reached}/{row.step}",
            _text(row.loss, ".4f"),
            _text(row.ns_steps, "d"),
            *(_text(row.tasks.get(task), ".2f") for task in tasks),
            *([_text(row.average, ".2f")] if tasks else []),
        ]
        for row in rows
    ]
    return f"{name}\n\n{markdown([*header, *averaged], cells)}"


def _text(value: float | None, form: str) -> str:
    return NOTHING if value is None else format(value, form)
