"""Running jobs one after another on this machine."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.amo_paper.resolve import PAPER, ROOT, Job
from torchtitan_ext.runs import run_files
from torchtitan_ext.signals import STOPPED

AMO = (sys.executable, "-m", "torchtitan_ext")
"""Runs a command of `amo`."""


def steps_done(job: Job) -> int:
    """The last logged step; a run logs its very last one, before it saves it."""
    records = run_files.read_metrics(ROOT / job.folder).steps
    return int(records[-1]["step"]) if records else 0


def is_done(job: Job) -> bool:
    """Whether the run is complete: its last step is logged and saved."""
    return steps_done(job) >= job.steps and run_files.is_complete(job.checkpoint(None))


def run_jobs(jobs: Sequence[Job], extra: Sequence[str], ranks: int) -> int:
    """Run the jobs that are not complete, one after another; a started one goes on.

    Args:
        jobs: Jobs in their order.
        extra: Further options of torchtitan for all of them.
        ranks: Processes of each run.

    Returns:
        0, or the exit status of the first run that failed or was stopped.

    Raises:
        ValueError: A command that prepares a run failed.
    """
    todo = [job for job in jobs if not is_done(job)]
    for job in jobs:
        if job not in todo:
            print(f"{job.folder.name}: complete, {job.steps} steps")
    for number, job in enumerate(todo, start=1):
        print(f"[{number}/{len(todo)}] {job.folder.name}: {job.steps} steps", flush=True)
        _prepare(job)
        status = _train(job, extra, ranks)
        if status != 0:
            end = "stopped; the same command goes on" if status == STOPPED else "failed"
            print(f"{job.folder.name}: {end} (status {status})", file=sys.stderr)
            return status
    return 0


def _prepare(job: Job) -> None:
    if not job.prepare or (ROOT / job.prepare[-1]).exists():
        return
    # Paths of commands are relative to the repository, wherever this process runs.
    program = [sys.executable, *PAPER[1:], *job.prepare]
    if subprocess.run(program, cwd=ROOT, check=False).returncode:
        raise ValueError(f"{job.folder.name}: failed: {shlex.join((*PAPER, *job.prepare))}")


def _train(job: Job, extra: Sequence[str], ranks: int) -> int:
    # A run of its own, as one would start it; a failure here is looked at, not repeated.
    command = ("train", str(job.config), "--ranks", str(ranks), *job.arguments(), *extra)
    process = subprocess.Popen([*AMO, *command], cwd=ROOT)
    try:
        return process.wait()
    finally:  # it ends its ranks when it is terminated
        if process.poll() is None:
            process.terminate()
            process.wait()
