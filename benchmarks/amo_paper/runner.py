"""Running jobs one after another on this machine, or writing them down for Slurm."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.amo_paper.resolve import GPUS_PER_NODE, PAPER, ROOT, Config, Job
from torchtitan_ext.config import files
from torchtitan_ext.runs import run_files
from torchtitan_ext.signals import STOPPED

LAUNCHER = ROOT / "launch" / "train.slurm"
"""Starts one run; its demands on Slurm are those of an array's tasks too."""

AMO = (sys.executable, "-m", "torchtitan_ext")
"""Runs a command of `amo`."""


def steps_done(job: Job) -> int:
    """The last logged step; a run logs its very last one, before it saves it."""
    records = run_files.read_metrics(ROOT / job.folder).steps
    return int(records[-1]["step"]) if records else 0


def is_done(job: Job) -> bool:
    """Whether the run is complete: its last step is logged, and saved where it saves."""
    if steps_done(job) < job.steps:
        return False
    return not _saves(job) or run_files.is_complete(job.checkpoint(None))


def _saves(job: Job) -> bool:
    """Whether a run writes checkpoints: as it was last started, or as its config says."""
    saved = run_files.read_config(ROOT / job.folder)
    fields = dict(files.fields(saved)) if saved else Config.read(job.config).fields
    return bool(fields.get("checkpoint.enable")) and not fields.get("checkpoint.load_only")


def check(jobs: Sequence[Job], extra: Sequence[str]) -> None:
    """Parse every job's config, so that mistakes show before any run starts.

    Args:
        jobs: What is about to start.
        extra: Further options of torchtitan for all of them.

    Raises:
        ValueError: A config does not work.
    """
    from torchtitan_ext.config import settings

    for job in jobs:
        made = _not_made_yet(job)
        arguments = [argument for argument in job.arguments() if argument not in made]
        try:
            settings.resolve(str(ROOT / job.config), [*arguments, *extra])
        except ValueError as error:
            raise ValueError(f"{job.folder.name}: {error}") from None


def _not_made_yet(job: Job) -> list[str]:
    """Arguments that name files which a command has yet to make before the run."""
    missing = [command[-1] for command in job.prepare if not (ROOT / command[-1]).exists()]
    return [one for one in job.arguments() if one.partition("=")[2] in missing]


def run_jobs(jobs: Sequence[Job], extra: Sequence[str], ranks: int) -> int:
    """Run the jobs that are not complete, one after another; a started one goes on.

    Args:
        jobs: In order.
        extra: Further options of torchtitan for all of them.
        ranks: Processes of each run.

    Returns:
        0, or the exit status of the first run that failed or was stopped.

    Raises:
        ValueError: As :func:`check`; or the checkpoint that a run starts from is missing.
    """
    todo = [job for job in jobs if not is_done(job)]
    for job in jobs:
        if job not in todo:
            print(f"{job.folder.name}: complete, {job.steps} steps")
    check(todo, extra)
    for number, job in enumerate(todo, start=1):
        print(f"[{number}/{len(todo)}] {job.folder.name}: {job.steps} steps", flush=True)
        _require_checkpoint(job)
        _prepare(job)
        status = _train(job, extra, ranks)
        if status != 0:
            end = "stopped; the same command goes on" if status == STOPPED else "failed"
            print(f"{job.folder.name}: {end} (status {status})", file=sys.stderr)
            return status
    return 0


def _require_checkpoint(job: Job) -> None:
    if job.continues is not None and not (ROOT / job.continues / ".metadata").exists():
        raise ValueError(
            f"{job.folder.name}: found no checkpoint {job.continues}, expected that of the run it "
            f"continues, {job.run.continues}; another one: --checkpoint.initial_load_path"
        )


def _prepare(job: Job) -> None:
    for command in job.prepare:
        output = ROOT / command[-1]
        if output.exists():
            continue
        # Paths of commands are relative to the repository, wherever this process runs.
        program = [sys.executable, *PAPER[1:], *command]
        status = subprocess.run(program, cwd=ROOT, check=False).returncode
        if status != 0:
            raise ValueError(f"{job.folder.name}: failed: {shlex.join((*PAPER, *command))}")


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


def slurm_scripts(
    name: str, jobs: Sequence[Job], extra: Sequence[str], path: Path
) -> Mapping[Path, str]:
    """Array scripts for Slurm, one for each number of GPUs: a task of the array is a run.

    Args:
        name: Of the experiment.
        jobs: What the tasks run.
        extra: Further options of torchtitan for all of them.
        path: Name of the script; with several, the number of GPUs is put before the suffix.

    Returns:
        Text by path; nothing is written.
    """
    by_gpus: dict[int, list[Job]] = {}
    for job in jobs:
        by_gpus.setdefault(job.gpus or GPUS_PER_NODE, []).append(job)
    many = len(by_gpus) > 1
    return {
        path.with_stem(f"{path.stem}-{gpus}gpus") if many else path: _slurm(
            name, gpus, group, extra
        )
        for gpus, group in by_gpus.items()
    }


def _slurm(name: str, gpus: int, jobs: Sequence[Job], extra: Sequence[str]) -> str:
    nodes = -(-gpus // GPUS_PER_NODE)
    fields = {
        "job-name": f"amo-{name}\n#SBATCH --array=0-{len(jobs) - 1}",
        "nodes": nodes,
        "gpus-per-node": -(-gpus // nodes),
        "output": "slurm-%A_%a.txt",
    }
    cases = "\n".join(f"  {index}) {_slurm_case(job, extra)} ;;" for index, job in enumerate(jobs))
    return f"""#!/usr/bin/env bash
# Written by `{shlex.join(PAPER)} run {name} --slurm`: its runs on {gpus} GPUs each.
# Submit from the repository's root. A complete run ends at once, a started one goes on.
{_slurm_head(fields)}
set -euo pipefail
cd "${{SLURM_SUBMIT_DIR:?submit this script with sbatch}}"

case "$SLURM_ARRAY_TASK_ID" in
{cases}
  *) echo "no run $SLURM_ARRAY_TASK_ID" >&2; exit 2 ;;
esac
# In the place of this shell: the signal before the time limit goes to the batch shell alone.
exec bash launch/train.slurm "$@"
"""


def _slurm_head(fields: Mapping[str, object]) -> str:
    """What ``launch/train.slurm`` asks of Slurm, with other values of some fields."""
    lines = re.findall(r"^#SBATCH --.*$", LAUNCHER.read_text(), re.MULTILINE)
    for name, value in fields.items():
        (index,) = (i for i, line in enumerate(lines) if line.startswith(f"#SBATCH --{name}="))
        lines[index] = f"#SBATCH --{name}={value}"
    return "\n".join(lines)


def _slurm_case(job: Job, extra: Sequence[str]) -> str:
    # Several tasks may want one file; whoever comes second finds it.
    prepare = [
        f"[[ -f {shlex.quote(command[-1])} ]] || {shlex.join((*PAPER, *command))}; "
        for command in job.prepare
    ]
    return f"{''.join(prepare)}set -- {shlex.join([str(job.config), *job.arguments(), *extra])}"
