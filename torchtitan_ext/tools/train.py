"""``amo train``: the training of one config, alone or as a rank of torchrun."""

from __future__ import annotations

import argparse
import os
import traceback

from amo_dist.tools.command import Subparsers
from torchtitan_ext import train

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
        help="train what a config says",
        description="Train what a TOML file says, in this process; on several ranks under "
        "torchrun, e.g. torchrun --nproc-per-node 2 -m torchtitan_ext train configs/x.toml.",
        epilog="Other options go to torchtitan, e.g. --training.steps 200 --optimizer.lr 2e-3.",
    )
    parser.add_argument("config", metavar="FILE", help="TOML file, such as those of configs")
    parser.set_defaults(run=run, overrides=[])


def run(args: argparse.Namespace) -> int:
    """Train for parsed arguments; the exit status is that of ``torchtitan_ext.train.main``."""
    if "RANK" not in os.environ:
        os.environ.update(ALONE | {k: v for k, v in os.environ.items() if k in ALONE})
    try:
        return train.main(["--job.config_file", args.config, *args.overrides])
    except ValueError:
        # No mistake of the user's, those are told already: the front door would hide where it is.
        traceback.print_exc()
        return 1
