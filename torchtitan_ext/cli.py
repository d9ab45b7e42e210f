"""The front door: ``amo <command>``, or ``python -m torchtitan_ext <command>``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

import amo_dist.cli
from torchtitan_ext.tools import (
    compare,
    evaluate,
    experiments,
    export,
    preflight,
    quickstart,
    report,
    static_schedule,
    tokenize,
    watch,
)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {message} (see --help)", file=sys.stderr)
        raise SystemExit(2)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands, those of ``amo_dist`` included."""
    parser: argparse.ArgumentParser = _Parser(
        prog="amo", description="Adaptive Muon Orthogonalization."
    )
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    quickstart.add_command(subparsers)
    for tool in (compare, evaluate, experiments, export, preflight, static_schedule, tokenize):
        tool.add_command(subparsers)
    for tool in (report, watch):
        tool.add_command(subparsers)
    amo_dist.cli.add_commands(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments after the program's name; those of the process by default.

    Returns:
        The exit status: 0, 2 for a mistake of the user's (told in one line), or the command's own.
    """
    parser = build_parser()
    try:
        args, rest = parser.parse_known_args(argv)
        if hasattr(args, "overrides"):  # a command that passes options on to torchtitan
            args.overrides = rest
        elif rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
    except SystemExit as stop:  # after --help, or an error that argparse reported
        return int(stop.code or 0)
    try:
        status: int = args.run(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
