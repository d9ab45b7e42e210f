"""``amo quickstart``: a small run from nothing to a locked plan, in a few minutes on two cores."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from amo_dist.tools.command import MOST_RANKS, Mistakes, Subparsers, whole
from torchtitan_ext.runs import folder as runs
from torchtitan_ext.runs.records import METRICS_FILE
from torchtitan_ext.runs.run_files import read_metrics, read_plan, require_unlocked
from torchtitan_ext.signals import STOPPED
from torchtitan_ext.tools import train

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "quickstart.toml"


def add_command(subparsers: Subparsers) -> None:
    """Register ``quickstart``."""
    parser = subparsers.add_parser(
        "quickstart",
        help="train a small model with AMO on this machine",
        description="Train a small llama on the sources of the Python standard library until AMO's "
        "plan is locked, and show the plan. A second call continues an unfinished run.",
        epilog="Other options go to torchtitan, e.g. --training.steps 200 --optimizer.lr 2e-3.",
    )
    parser.add_argument("--fresh", action="store_true", help="delete the run's folder first")
    parser.add_argument(
        "--ranks",
        type=whole(1, MOST_RANKS),
        help="processes (default: one per GPU, or 2 without GPUs)",
    )
    parser.set_defaults(run=run, overrides=[])


def run(args: argparse.Namespace) -> int:
    """Start the run or go on with it, and print the result.

    Returns:
        The status of :func:`train.start`: 75 where training was stopped before its end.

    Raises:
        ValueError: For a config that cannot work, or that is not the one of the run in its folder.
    """
    from torchtitan_ext.config import settings

    arguments = [f"--job.config_file={CONFIG}", *args.overrides]
    config = settings.parse(arguments)  # before any rank starts: one error, printed once
    num_ranks = train.pick_ranks(args.ranks, None, config)
    folder = runs.RunFolder(Path(config.dump_folder), config.checkpoint.folder)
    require_unlocked(folder.path, config.checkpoint.stop_seconds)
    config, problems = train.examine(config, num_ranks)
    if problems:
        raise Mistakes(problems)
    if args.fresh:
        folder.delete()
    step = folder.prepare(config.to_dict())
    steps = config.training.steps
    if step >= steps:
        print(f"The run in {folder.path} is complete ({step} steps); --fresh starts anew.")
    else:
        begin = f"Resuming from the checkpoint of step {step}" if step else "Starting anew"
        print(f"{begin}: {steps} steps on {num_ranks} ranks, in {folder.path}.", flush=True)
        start = time.monotonic()
        status = train.start(settings.for_ranks(config), config, num_ranks)
        if status == STOPPED or status >= 128:
            _tell_stop(folder.latest_step(), steps)
        if status:
            return status
        print(f"Trained in {time.monotonic() - start:.0f} s.")
    _summarize(config, folder.checkpoints)
    return 0


def _tell_stop(step: int, steps: int) -> None:
    if step:
        print(
            f"\nStopped; step {step} of {steps} is saved, and the same command goes on from there."
        )
    else:
        print("\nStopped before the first checkpoint; the same command starts anew.")


def _summarize(config: Any, checkpoints: Path) -> None:
    folder = Path(config.dump_folder)
    records = read_metrics(folder).steps
    plan = read_plan(folder)
    if plan is not None:
        print(f"\n{_plan_title(config)}:")
        print(plan)
    if records:
        first, last = records[0], records[-1]
        print(f"\nloss         {first['loss']:.4f} at step {first['step']}, ", end="")
        print(f"{last['loss']:.4f} at step {last['step']}")
    print(f"checkpoints  {checkpoints}")
    print(f"metrics      {folder / METRICS_FILE}")
    if config.metrics.enable_tensorboard:
        print(f"TensorBoard  tensorboard --logdir {folder / config.metrics.save_tb_folder}")


def _plan_title(config: Any) -> str:
    amo, steps = config.optimizer.amo, config.training.steps
    return "The plan" + (f", locked at step {amo.lock_step}" if steps >= amo.lock_step else "")
