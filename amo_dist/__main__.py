"""Commands of ``python -m amo_dist``; ``amo`` of ``torchtitan_ext`` includes them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from amo_dist.config import __version__
from amo_dist.doctor import command as doctor
from amo_dist.schedule import command as plan


def add_commands(subparsers: Any) -> None:
    """Register every command of ``amo_dist``.

    Args:
        subparsers: Subparsers of the program. Each command sets ``run``: ``args.run(args)`` returns
            the exit status, and raises ``ValueError`` for a mistake of the user's.
    """
    text = "plan Newton-Schulz steps by operator type, from ell targets or from a run's plan"
    plan.add_arguments(subparsers.add_parser("plan", help=text))
    text = "check machines, network and optimizer on all ranks before training"
    doctor.add_arguments(subparsers.add_parser("doctor", help=text))


def run_command(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> int:
    """Parse arguments, and run the command that they name.

    Args:
        parser: Parser of commands as `add_commands` registers them.
        argv: Arguments after the program's name; None for those of the process.

    Returns:
        The command's own exit status; 2 for a mistake of the user's, or a file that cannot be read
        or written, printed in one line.
    """
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, as `run_command` does."""
    program, text = "python -m amo_dist", "Tools of AMO that need no training run."
    parser = argparse.ArgumentParser(prog=program, description=text)
    parser.add_argument("--version", action="version", version=f"amo-dist {__version__}")
    add_commands(parser.add_subparsers(metavar="COMMAND", required=True))
    return run_command(parser, argv)


if __name__ == "__main__":
    raise SystemExit(main())
