"""``python -m benchmarks.amo_paper <command>``: runs, evaluations and tables of the AMO paper."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.amo_paper import compare, evaluate, experiments, figures, static_schedule
from torchtitan_ext.tools.command import run_command


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.amo_paper",
        description="The experiments of the AMO paper. Each consists of runs, and a run is a "
        "config with options. Runs have folders of their own under --out. A complete run is not "
        "repeated, a started one goes on, and a run of several experiments runs once.",
    )
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for tool in (experiments, evaluate, compare, figures, static_schedule):
        tool.add_commands(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments after the program's name; those of the process by default.

    Returns:
        The exit status: 0, 2 for a mistake of the user's, or the command's own.
    """
    return run_command(build_parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
