"""The commands that show, run, gather and evaluate experiments."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.amo_paper import evaluate, gather, runner
from benchmarks.amo_paper.catalog import EXPERIMENTS, Experiment
from benchmarks.amo_paper.resolve import QUICKSTART, Job, Place, resolve
from benchmarks.amo_paper.results import SHORT, check_examples


def add_commands(actions: Any) -> None:
    """Register the commands of experiments."""
    listing = actions.add_parser("list", help="all experiments, and how many runs they have")
    listing.set_defaults(run=_list)
    _add(actions, "show", "print the commands of an experiment", _show)
    run = _add(actions, "run", "run an experiment on this machine", _run)
    run.add_argument("--ranks", type=int, help="processes (default: GPUs, or 2 without any)")
    run.set_defaults(overrides=[])
    run.epilog = "Other options go to torchtitan, for all runs."
    _add(actions, "gather", "print the table of an experiment", _gather)
    evaluate = _add(actions, "evaluate", "evaluate what is complete and not evaluated", _evaluate)
    evaluate.add_argument(
        "--tasks", default=",".join(SHORT), help="default: the twelve tasks of the paper"
    )


def _add(
    actions: Any, name: str, text: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text)
    text = "an experiment that `list` names"
    parser.add_argument("name", metavar="NAME", choices=EXPERIMENTS, help=text)
    parser.add_argument("--model", help="only the runs of this model of the paper")
    parser.add_argument(
        "--small",
        action="store_true",
        help=f"on the model of {QUICKSTART}, if no option counts steps of the paper's runs "
        "(in place of one model: --model, or the first)",
    )
    parser.add_argument(
        "--out", type=Path, default=Place().out, help="folder of the runs (default %(default)s)"
    )
    parser.set_defaults(run=run)
    return parser


def selection(args: argparse.Namespace) -> tuple[Experiment, Place]:
    """The experiment that arguments name, and where its runs go.

    Raises:
        ValueError: The model is unknown, or the small one has not the experiment's steps.
    """
    experiment, model = EXPERIMENTS[args.name], args.model
    if args.small and experiment.counts_steps():
        raise ValueError(f"--small: found {args.name}, whose options count steps of longer runs")
    if args.small and model is None:
        # The stand-in is one model, and would train twice what the paper does on two.
        model = experiment.rows[0].run.model
    return experiment.for_model(model), Place(args.out, args.small)


def jobs_of(experiment: Experiment, place: Place) -> list[Job]:
    """The jobs of an experiment, in order."""
    return [resolve(run, place) for run in experiment.runs()]


def _list(args: argparse.Namespace) -> int:
    width = max(map(len, EXPERIMENTS))
    for name, experiment in EXPERIMENTS.items():
        runs, rows = len(experiment.runs()), len(experiment.rows)
        print(f"{name:<{width}}  {runs:>2} runs, {rows:>2} rows  {experiment.title}")
    return 0


def _show(args: argparse.Namespace) -> int:
    experiment, place = selection(args)
    jobs = jobs_of(experiment, place)
    runs, rows = len(jobs), len(experiment.rows)
    print(f"# {experiment.name}: {experiment.title}; {runs} runs, {rows} rows\n")
    for job in jobs:
        print(f"{_heading(job)}\n{job.shown()}\n")
    return 0


def _heading(job: Job) -> str:
    gpus = "" if job.gpus is None else f", {job.gpus} GPUs"
    done = runner.steps_done(job)
    state = "complete" if runner.is_done(job) else (f"at step {done}" if done else "not started")
    return f"# {job.folder.name}: {job.steps} steps{gpus}, {state}"


def _run(args: argparse.Namespace) -> int:
    experiment, place = selection(args)
    from torchtitan_ext.plugin import machine

    ranks = args.ranks or machine.most_ranks()
    return runner.run_jobs(jobs_of(experiment, place), args.overrides, ranks)


def _gather(args: argparse.Namespace) -> int:
    experiment, place = selection(args)
    print(gather.table(experiment, gather.gather(experiment, place)))
    return 0


def _evaluate(args: argparse.Namespace) -> int:
    experiment, place = selection(args)
    for row in experiment.rows:
        job = resolve(row.run, place)
        checkpoint, output = job.checkpoint(row.step), job.results(row.step)
        if output.exists():
            continue
        if not (checkpoint / ".metadata").exists():
            print(f"# {job.folder.name}: no checkpoint of step {job.step_of(row.step)} yet")
            continue
        options = f"--tasks {args.tasks} --output {output}"
        print(f"python -m benchmarks.amo_paper score {checkpoint} {options}", flush=True)
        # Not the row's: a run that belongs to several tables has one results file.
        optimizer = str(job.run.options["optimizer.name"])
        record = evaluate.evaluate(checkpoint, job.run.model, optimizer, tasks=args.tasks)
        for warning in check_examples(record):
            print(f"warning: {warning}", file=sys.stderr)
        evaluate.write(record, output)
    return 0
