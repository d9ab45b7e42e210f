"""A study of single runs: their records, the best rate of each, and its command.

A run is a frozen dataclass with the fields ``rate`` and ``seed``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.plan_quality import data
from benchmarks.tables import markdown, plus_minus

Run = TypeVar("Run", bound=Any)


def read(path: Path, parse: Callable[[dict[str, Any]], Run]) -> dict[Run, float]:
    """Validation loss of each run, which ``parse`` makes of the fields of its record."""
    records: dict[Run, float] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        fields = json.loads(line)
        loss = fields.pop("validation_loss")
        records[parse(fields)] = loss
    return records


def best_rate(records: Mapping[Run, float], run: Run) -> float:
    """Rate of the least loss among the runs that differ from ``run`` in nothing else."""
    tried = [other for other in records if replace(other, rate=run.rate) == run]
    best: Run = min(tried, key=records.__getitem__, default=run)
    return float(best.rate)


def differences(records: Mapping[Run, float], like: Run, today: Run) -> list[float]:
    """Loss less today's by seed, both at the best rate of the first seed."""
    pairs = []
    for seed in sorted({run.seed for run in records}):
        both = [
            records.get(replace(run, rate=best_rate(records, run), seed=seed))
            for run in (like, today)
        ]
        if None not in both:
            pairs.append(both[0] - both[1])  # type: ignore[operator]
    return pairs


def table(records: Mapping[Run, float], named: Mapping[str, Run], today: Run, what: str) -> str:
    """Table of runs with the first seed, by name and rate, and their differences to today's."""
    rates = sorted({run.rate for run in records if replace(run, rate=0.0) in named.values()})
    rows = []
    for name, like in named.items():
        losses = [records.get(replace(like, rate=rate)) for rate in rates]
        texts = ["" if loss is None else f"{loss:.4f}" for loss in losses]
        rows.append([name, *texts, plus_minus(differences(records, like, today), "+")])
    return markdown([what, *(f"{rate:g}" for rate in rates), "minus today's, by seed"], rows)


def main(
    name: str,
    path: Path,
    read: Callable[[Path], dict[Run, float]],
    jobs: Callable[[dict[Run, float]], Iterable[Run]],
    validation_loss: Callable[[Run, data.Corpus], float],
    report: Callable[[dict[Run, float]], Iterable[str]],
    args: Sequence[str] | None,
) -> int:
    """Train what has no record yet, in the order of ``jobs``, or print the report."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.plan_quality.{name}")
    parser.add_argument("command", choices=("run", "report"))
    parser.add_argument("--output", type=Path, default=path)
    options = parser.parse_args(args)
    records = read(options.output)
    if options.command == "report":
        print("\n".join(report(records)))
        return 0
    corpus = data.load(data.standard_library())
    options.output.parent.mkdir(parents=True, exist_ok=True)
    for run in jobs(records):
        if run in records:
            continue
        records[run] = validation_loss(run, corpus)
        line: dict[str, Any] = dataclasses.asdict(run) | {"validation_loss": records[run]}
        with options.output.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{run}: {records[run]:.4f}", flush=True)
    return 0
