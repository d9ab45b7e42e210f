"""Commands of ``python -m amo_dist``; the front door of ``torchtitan_ext`` offers them too."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from amo_dist.tools.command import Parser, Subparsers, run_command
from amo_dist.tools.doctor.command import add_doctor_command
from amo_dist.tools.plan import add_plan_command
from amo_dist.tools.simulate import add_simulate_command


def add_commands(subparsers: Subparsers) -> None:
    """Register every command of ``amo_dist``.

    Args:
        subparsers: Of any parser. Each command sets ``run``; the program calls ``args.run(args)``,
            which returns an exit status and raises ``ValueError`` for a mistake of the user's.
    """
    for add_command in (add_plan_command, add_simulate_command, add_doctor_command):
        add_command(subparsers)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments after the program's name; those of the process by default.

    Returns:
        0, or 2 for a mistake of the user's, which is reported in one line.
    """
    parser: argparse.ArgumentParser = Parser(
        prog="python -m amo_dist", description="Tools of AMO that need no training run."
    )
    add_commands(parser.add_subparsers(metavar="COMMAND", required=True))
    return run_command(parser, argv)
