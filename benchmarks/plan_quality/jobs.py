"""All runs, and running them."""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.plan_quality import train
from benchmarks.plan_quality.data import Corpus
from benchmarks.plan_quality.model import ARCHITECTURES
from benchmarks.plan_quality.rows import ROWS, Planner, relative_flops
from benchmarks.plan_quality.settings import Settings
from benchmarks.plan_quality.train import Start
from torchtitan_ext.runs import files

CONTENDERS = ("uniform-5", "uniform-3", "distance-0.6")
"""The bar, and what could win by its flops."""
ALL_SEEDS = (*CONTENDERS, "residual-alike-0.8", "distance-0.8", "uniform-4", "residual-0.8")
"""These, and plans of other objectives and other budgets."""
ONE_SEED = ("kj", "distance-0.6-from-1", "direction-0.8", "depth-0.6-from-1")
NOISE = tuple(f"uniform-5~{order}" for order in range(1, 6))
"""The bar again, with the sums of each batch in another order after the switch."""
RATES = (0.004, 0.008, 0.016, 0.032)
RATE_SEED = 99
NS_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """Rows that share a start."""

    start: Start
    rows: tuple[str, ...]


def all_jobs() -> list[Job]:
    """All jobs of the study of plans."""
    first, _, third = ARCHITECTURES
    wanted = [Job(Start(first, 0, order=order), ("uniform-5",)) for order in range(1, 6)]
    wanted.append(Job(Start(first, 0), ("uniform-5", *NOISE)))
    for name in ARCHITECTURES:
        wanted += [Job(Start(name, RATE_SEED, rate=rate), CONTENDERS) for rate in RATES]
        wanted += [Job(Start(name, seed), ALL_SEEDS) for seed in range(5)]
        wanted += [Job(Start(name, seed), ("distance-0.5",)) for seed in (0, 1)]
        wanted.append(Job(Start(name, 0), ONE_SEED))
        wanted += [Job(Start(name, seed, "as_is"), ("uniform-5",)) for seed in range(5)]
        wanted.append(Job(Start(name, 0, "as_is"), ("residual-alike-0.8", "uniform-3")))
        wanted += [Job(Start(name, 0, switch=step), ("uniform-3",)) for step in (12, 50)]
    for name in (first, third):
        wanted.append(Job(Start(name, 0, steps=2000, switch=800), CONTENDERS))
    return wanted


def dtype_jobs() -> list[Job]:
    """Uniform five steps with iterates of each dtype."""
    return [
        Job(Start(name, seed, ns_dtype=dtype), ("uniform-5",))
        for seed in range(2)
        for name in ARCHITECTURES
        for dtype in NS_DTYPES
    ]


def record_path(output: Path, start: Start, row: str) -> Path:
    """Path of the record of one run."""
    return output / "runs" / f"{start.key}-{row}.json"


def missing(output: Path, job: Job) -> list[str]:
    """Rows that have no record."""
    return [row for row in job.rows if not record_path(output, job.start, row).exists()]


def work(jobs: Sequence[Job], output: Path, corpus: Corpus, settings: Settings) -> None:
    """Run what has no record; each is written when it is done.

    Args:
        jobs: Jobs in their order.
        output: Folder of the records.
        corpus: Text of all runs.
        settings: Settings of all runs.
    """
    output.joinpath("runs").mkdir(parents=True, exist_ok=True)
    for job in jobs:
        if missing(output, job):
            run(job, output, corpus, settings)


def run(job: Job, output: Path, corpus: Corpus, settings: Settings) -> None:
    """Run the rows of a job that have no record."""
    start = job.start
    snapshot = train.begin(start, ARCHITECTURES[start.architecture], corpus, settings)
    shapes, types = train.matrix_shapes(snapshot.model)
    planner = Planner(snapshot.spectra, shapes, types)
    print(f"{start.key}: begun", flush=True)
    for name in missing(output, job):
        row, _, order = name.partition("~")
        schedules, plan = planner.choose(ROWS[row])
        model = train.finish(snapshot, schedules, corpus, settings, order=int(order or 0))
        record: dict[str, Any] = {
            **dataclasses.asdict(start),
            "row": name,
            "validation_loss": train.evaluate(model, corpus, settings),
            "flops_after": relative_flops(schedules, shapes),
            "plan": plan,
            "digest": train.digest(model),
            "settings": dataclasses.asdict(settings),
            "corpus": corpus.digest,
            "machine": f"{platform.machine()}, torch {torch.__version__}",
        }
        files.replace(record_path(output, start, name), json.dumps(record) + "\n")
        print(f"{start.key} {name}: {record['validation_loss']:.4f}", flush=True)
