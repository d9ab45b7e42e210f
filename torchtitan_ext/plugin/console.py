"""Lines that a run prints, and lines for its log file alone."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

_OURS = ("amo_dist", "torchtitan_ext")
# Logger that announces plans.
_PLANS = "amo_dist.optimizers.muon"


def brief(folder: Path) -> None:
    """Show progress, plans, errors and the project's warnings; everything else goes to a file.

    Args:
        folder: Folder of ``log_rank<r>.txt``, which is appended to; made if missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    root = logging.getLogger()
    file = logging.FileHandler(folder / f"log_rank{os.environ.get('RANK', '0')}.txt")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    console = logging.StreamHandler(sys.stdout)
    console.setFormatter(logging.Formatter("%(message)s"))
    console.addFilter(_is_for_console)
    root.handlers[:] = [file, console]
    logging.captureWarnings(True)


def _is_for_console(record: logging.LogRecord) -> bool:
    if record.levelno >= logging.ERROR or record.name == "torchtitan_ext.progress":
        return True
    is_ours = record.name.split(".", 1)[0] in _OURS
    first = os.environ.get("RANK", "0") == "0"
    return is_ours and first and (record.levelno >= logging.WARNING or record.name == _PLANS)
