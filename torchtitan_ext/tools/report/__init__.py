"""``amo report``: what runs did, as one HTML file of figures and tables."""

from __future__ import annotations

from torchtitan_ext.tools.report.command import add_command

__all__ = ["add_command"]
