"""Plugs ``amo_dist`` into torchtitan 0.3.0; importing the package alone is cheap.

``torchtitan_ext.train`` trains from a TOML file, and so does torchtitan's own
``torchtitan.train --module torchtitan_ext --config NAME``. Loops of your own use checked
checkpoints and a run's log from here, without torchtitan.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtitan_ext.plugin.storage import CheckpointReader, CheckpointWriter
    from torchtitan_ext.runs.run_log import RunLog

__all__ = ["CheckpointReader", "CheckpointWriter", "RunLog"]

# Modules of the names that are imported when they are first read.
_MODULES = {
    "CheckpointReader": "plugin.storage",
    "CheckpointWriter": "plugin.storage",
    "RunLog": "runs.run_log",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
