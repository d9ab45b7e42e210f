"""``amo train``: one config checked and trained on this node, or as a rank of torchrun."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from amo_dist.tools.command import MOST_RANKS, Subparsers, whole
from torchtitan_ext import train
from torchtitan_ext.plugin import machine
from torchtitan_ext.runs.run_files import require_unlocked
from torchtitan_ext.tools import launch
from torchtitan_ext.tools.preflight_memory import checkpoint_sizes, groups_of, meta_model

ALONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "0",  # any free one
}
"""What torchrun would tell a rank, for one that nothing has told anything."""


def add_command(subparsers: Subparsers) -> None:
    """Register ``train``."""
    parser = subparsers.add_parser(
        "train",
        help="check a config and train it on this node",
        description="Check what a TOML file says and train it, on the GPUs of this node or on two "
        "CPU ranks; as many as its batch can be dealt to. Under torchrun, as one of its ranks.",
        epilog="Other options go to torchtitan, e.g. --training.steps 200 --optimizer.lr 2e-3.",
    )
    parser.add_argument("config", metavar="FILE", help="TOML file, such as those of configs")
    parser.add_argument(
        "--ranks", type=whole(1, MOST_RANKS), help="processes; 1 trains in this one"
    )
    parser.set_defaults(run=run, overrides=[])


def run(args: argparse.Namespace) -> int:
    """Train for parsed arguments.

    Returns:
        The exit status of ``torchtitan_ext.train.main``: 2 for mistakes, which are told all at
        once; 130 where training was told to stop.

    Raises:
        ValueError: For a file that is no TOML, a folder that another run writes into, or a number
            of ranks that cannot work.
    """
    arguments = ["--job.config_file", args.config, *args.overrides]
    if "RANK" in os.environ:  # torchrun's
        return _train(arguments)
    from torchtitan_ext.tools import preflight_checks

    config, problems = preflight_checks.load(arguments)
    num_ranks = _pick(args.ranks, config)
    problems += find_problems(config, num_ranks, lacks=not problems)
    if problems:
        for problem in dict.fromkeys(problems):
            print(f"error: {problem}", file=sys.stderr)
        return train.USER_ERROR
    folder = Path(config.dump_folder)
    require_unlocked(folder)
    from torchtitan_ext.data.loader import tokenize_first  # imports torchtitan

    tokenize_first(config)
    if num_ranks == 1:
        os.environ.update(ALONE | {k: v for k, v in os.environ.items() if k in ALONE})
        return _train(arguments)
    print(f"Training on {num_ranks} ranks, in {folder}.", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    status = launch.start(arguments, num_ranks, config)
    return 130 if status is None else status


def find_problems(config: Any, num_ranks: int, *, lacks: bool = True) -> list[str]:
    """What is wrong with a config on this node, one line each.

    Args:
        config: Parsed; what follows from other fields is filled in.
        num_ranks: Processes.
        lacks: Ask also what this machine lacks, where nothing else is wrong.
    """
    from torchtitan_ext.tools import preflight_checks, preflight_here

    problems = preflight_checks.check(config, num_ranks, _memory_gb(num_ranks))
    if lacks and not problems:
        groups = groups_of(meta_model(config), config)
        problems = preflight_here.lacks(config, checkpoint_sizes(config, groups))
    return problems


def _train(arguments: list[str]) -> int:
    """Train in this process."""
    try:
        return train.main(arguments)
    except (OSError, ValueError):
        # No mistake of the user's, those are told already: the front door would hide where it is.
        traceback.print_exc()
        return 1


def _num_gpus() -> int:
    """GPUs to train on; 0 for training on CPU."""
    return 0 if machine.cpu_is_needed() else torch.cuda.device_count()


def _pick(given: int | None, config: Any) -> int:
    """Processes: as many as are asked for, or else the most of this node that a config fits.

    Raises:
        ValueError: For a number above that of the GPUs.
    """
    from torchtitan_ext.tools import preflight_checks

    gpus = _num_gpus()
    if given is not None:
        if gpus and given > gpus:
            raise ValueError(f"--ranks: found {given}, expected 1 to {gpus}, the GPUs of this node")
        return given
    most = gpus or 2
    fitting = (n for n in range(most, 0, -1) if not preflight_checks.check(config, n))
    return next(fitting, most)


def _memory_gb(num_ranks: int) -> float:
    """The memory that a rank of this machine has, in 1e9 bytes."""
    if _num_gpus():
        return torch.cuda.get_device_properties(0).total_memory / 1e9
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / num_ranks / 1e9
