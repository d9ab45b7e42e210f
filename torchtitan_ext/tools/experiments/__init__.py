"""``amo experiments``: the runs behind each table of the AMO paper, and the tables themselves."""

from __future__ import annotations

from torchtitan_ext.tools.experiments.command import add_command

__all__ = ["add_command"]
