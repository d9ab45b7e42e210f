"""Commands of ``python -m amo_dist``; ``amo`` of ``torchtitan_ext`` includes them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from amo_dist.config import __version__
from amo_dist.tools.command import Parser, Subparsers, run_command
from amo_dist.tools.doctor.command import add_doctor_command
from amo_dist.tools.plan import add_plan_command


def add_commands(subparsers: Subparsers) -> None:
    """Register every command of ``amo_dist``.

    Args:
        subparsers: Subparsers of the program. Each command sets ``run``: ``args.run(args)`` returns
            the exit status, and raises ``ValueError`` for a mistake of the user's.
    """
    for add_command in (add_plan_command, add_doctor_command):
        add_command(subparsers)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments after the program's name; None for those of the process.

    Returns:
        0, or 2 for a mistake of the user's, printed in one line.
    """
    parser: argparse.ArgumentParser = Parser(
        prog="python -m amo_dist", description="Tools of AMO that need no training run."
    )
    parser.add_argument("--version", action="version", version=f"amo-dist {__version__}")
    add_commands(parser.add_subparsers(metavar="COMMAND", required=True))
    return run_command(parser, argv)
