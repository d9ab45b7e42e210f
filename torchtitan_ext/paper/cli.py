"""Commands of ``amo paper``."""

from __future__ import annotations

from amo_dist.tools.command import Subparsers
from torchtitan_ext.paper import compare, experiments, static_schedule


def add_command(subparsers: Subparsers) -> None:
    """Register ``paper`` with its commands."""
    parser = subparsers.add_parser(
        "paper",
        help="reproduce the AMO paper: runs, tables, static schedules",
        description="Reproduce the AMO paper: its runs, tables of scores, static schedules.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for tool in (experiments, compare, static_schedule):
        tool.add_command(commands)
