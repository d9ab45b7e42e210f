"""Commands of ``amo paper``."""

from __future__ import annotations

from amo_dist.tools.command import Subparsers
from torchtitan_ext.paper import compare, evaluate, experiments, static_schedule


def add_command(subparsers: Subparsers) -> None:
    """Register ``paper`` with its commands."""
    parser = subparsers.add_parser(
        "paper",
        help="reproduce the AMO paper: runs, scores, tables, static schedules",
        description="Reproduce the AMO paper: its runs, their scores, tables and static schedules.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for tool in (experiments, evaluate, compare, static_schedule):
        tool.add_command(commands)
