"""The front door: ``amo <command>``, or ``python -m torchtitan_ext <command>``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from amo_dist.__main__ import add_commands
from amo_dist.config import __version__
from torchtitan_ext.tools import export, preflight, tokenize, train
from torchtitan_ext.tools.command import run_command
from torchtitan_ext.tools.report import command as report

EXTRAS = {
    **dict.fromkeys(("torchtitan", "torchdata", "tyro", "numpy", "tiktoken"), "titan"),
    **dict.fromkeys(("datatrove", "orjson", "pyarrow"), "data"),
    **dict.fromkeys(("jinja2", "matplotlib"), "plots"),
    "transformers": "eval",
}
"""Extra with which a package comes; commands that plan do without."""


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands, those of ``amo_dist`` included."""
    parser = argparse.ArgumentParser(prog="amo", description="Adaptive Muon Orthogonalization.")
    parser.add_argument("--version", action="version", version=f"amo-dist {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    tools: Sequence[Any] = (train, preflight, tokenize, report, export)
    for tool in tools:
        tool.add_command(subparsers)
    add_commands(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments after the program's name; those of the process by default.

    Returns:
        The exit status: 0, 2 for a mistake of the user's or a missing extra, or the command's own.
    """
    arguments = sys.argv[1:] if argv is None else argv
    try:
        return run_command(build_parser(), arguments)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRAS:
            raise
        print(
            f"error: {missing} is not installed, expected it for this command; "
            f"pip install 'amo-dist[{EXTRAS[missing]}]' (titan: Python 3.11 or later)",
            file=sys.stderr,
        )
        return 2


if __name__ == "__main__":
    sys.exit(main())
