"""Commands of ``python -m amo_dist``; the front door of ``torchtitan_ext`` offers them too."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from amo_dist.tools.command import Parser, Subparsers, run_command
from amo_dist.tools.plan import add_plan_command
from amo_dist.tools.simulate import add_simulate_command

COMMANDS: tuple[Callable[[Subparsers], None], ...] = (add_plan_command, add_simulate_command)
"""Each registers one command, whose parser sets ``run``: parsed arguments to an exit status."""


def add_commands(subparsers: Subparsers) -> None:
    """Register every command of ``amo_dist``.

    Args:
        subparsers: Of any parser. Its program calls ``args.run(args)``, which returns an exit
            status and raises ``ValueError`` for a mistake of the user's.
    """
    for add_command in COMMANDS:
        add_command(subparsers)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments after the program's name; those of the process by default.

    Returns:
        0, or 2 for a mistake of the user's, which is reported in one line.
    """
    parser: argparse.ArgumentParser = Parser(
        prog="amo_dist", description="Tools of AMO that need no training run."
    )
    add_commands(parser.add_subparsers(metavar="COMMAND", required=True))
    return run_command(parser, argv)
