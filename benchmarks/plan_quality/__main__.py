"""Train, score and report: ``python -m benchmarks.plan_quality train``, ``score``, ``report``.

``train`` runs what has no result yet, one run after the other on one thread, and may be stopped at
any time. ``score`` makes plans from the spectra of the uniform runs and scores them on later steps.
``report`` prints tables as Markdown and draws plots beside the results.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.plan_quality import data, report, score, train
from benchmarks.plan_quality.model import ARCHITECTURES
from benchmarks.plan_quality.settings import Settings
from benchmarks.plan_quality.variants import BASELINE, VARIANTS

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "plan_quality"
SPECTRA = ROOT / "outputs" / "plan_quality"

Job = tuple[str, int, str]
"""Architecture, seed, variant."""


def main(args: Sequence[str] | None = None) -> int:
    options = parser().parse_args(args)
    if options.command == "report":
        print(report.text(options.output))
        for path in report.plot(options.output):
            print(f"plot: {path}")
        return 0
    settings = changed(Settings(), options.set)
    if options.command == "train":
        train_all(jobs(options), options, settings)
    else:
        score_all(options, settings)
    return 0


def jobs(options: argparse.Namespace) -> list[Job]:
    """Seed by seed, so that what has been run at any time is balanced."""
    return [
        (architecture, seed, variant)
        for seed in options.seed
        for architecture in options.architecture
        for variant in options.variant
    ]


def changed(settings: Settings, assignments: Sequence[str]) -> Settings:
    """Settings with some fields replaced, each as ``field=value``."""
    kinds = {name: type(value) for name, value in dataclasses.asdict(settings).items()}
    values = {}
    for assignment in assignments:
        field, _, value = assignment.partition("=")
        if field not in kinds:
            raise ValueError(f"--set: found {assignment!r}, expected one of {', '.join(kinds)}")
        values[field] = kinds[field](value)
    return dataclasses.replace(settings, **values)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m benchmarks.plan_quality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = found.add_subparsers(dest="command", required=True)
    train, score, _ = parsers = [commands.add_parser(name) for name in ("train", "score", "report")]
    for command in parsers:
        command.add_argument("--output", type=Path, default=RESULTS, help="folder of results")
    for command in (train, score):
        command.add_argument(
            "--architecture", nargs="+", default=[*ARCHITECTURES], choices=ARCHITECTURES
        )
        command.add_argument("--seed", nargs="+", type=int, default=[0, 1, 2, 3, 4])
        command.add_argument("--spectra", type=Path, default=SPECTRA, help="folder of spectra")
        command.add_argument("--set", nargs="+", default=[], metavar="field=value")
    train.add_argument("--variant", nargs="+", default=[*VARIANTS], choices=VARIANTS)
    return found


def run_path(output: Path, job: Job) -> Path:
    architecture, seed, variant = job
    return output / "runs" / f"{architecture}-{seed}-{variant}.json"


def is_done(path: Path, settings: Settings) -> bool:
    """Whether there is a result.

    Raises:
        ValueError: It is one of other settings, which a report would mix with these.
    """
    if not path.exists():
        return False
    for field, found in json.loads(path.read_text())["settings"].items():
        if found != (expected := getattr(settings, field)):
            raise ValueError(f"{field}: found {found!r} in {path}, expected {expected!r}")
    return True


def train_all(jobs: Sequence[Job], options: argparse.Namespace, settings: Settings) -> None:
    """Run the jobs that have no result, one after the other."""
    open_jobs = [job for job in jobs if not is_done(run_path(options.output, job), settings)]
    print(f"{len(open_jobs)} of {len(jobs)} runs to do", flush=True)
    corpus, start = data.load(data.standard_library()), time.monotonic()
    for i, job in enumerate(open_jobs, start=1):
        architecture, seed, variant = job
        spectra = options.spectra / f"{architecture}-{seed}.pt" if variant == BASELINE else None
        result = train.run(
            *(ARCHITECTURES[architecture], VARIANTS[variant], seed, corpus, settings),
            spectra=spectra,
        )
        record: dict[str, Any] = {
            "architecture": architecture,
            "seed": seed,
            "variant": variant,
            **result,
            "settings": dataclasses.asdict(settings),
            "corpus": corpus.description,
            "machine": f"{platform.machine()}, torch {torch.__version__}",
        }
        train.write_json(run_path(options.output, job), record)
        left = (time.monotonic() - start) / i * (len(open_jobs) - i)
        loss = result["validation_loss"][str(settings.steps)]
        print(
            f"{i}/{len(open_jobs)} {architecture} seed {seed} {variant}: validation loss "
            f"{loss:.4f} in {result['seconds']:.0f} s, {left / 60:.0f} min to go",
            flush=True,
        )


def score_all(options: argparse.Namespace, settings: Settings) -> None:
    """Score all plans on the spectra that are there."""
    for seed in options.seed:
        for architecture in options.architecture:
            path = options.spectra / f"{architecture}-{seed}.pt"
            if not path.exists():
                print(f"{architecture} seed {seed}: no spectra in {path}, run `train` first")
                continue
            plans = score.score_all(*train.load_spectra(path), settings)
            record = {"architecture": architecture, "seed": seed, "plans": plans}
            train.write_json(options.output / "held_out" / f"{architecture}-{seed}.json", record)
            told = ", ".join(
                f"{name} {found['residual']:.3f} / {found['distance']:.3f}"
                for name, found in plans.items()
            )
            print(f"{architecture} seed {seed}: {told}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
