"""Checks of a config against the machines of its run: memory of a device, and time to save."""

from __future__ import annotations

from typing import Any

from torchtitan_ext.config import checks
from torchtitan_ext.tools.preflight_memory import check_memory, checkpoint_sizes

DISK_GB_PER_S = 1.0
"""Write speed that notes assume of a shared file system; real ones write 1 to 100 times as fast."""


def examine(config: Any, world_size: int, memory_gb: float | None = None) -> tuple[Any, list[str]]:
    """Complete a config, and check how its fields fit together and with a world.

    Args:
        config: Config as :func:`torchtitan_ext.config.settings.load` reads it; stays as it is.
        world_size: Number of ranks.
        memory_gb: Memory of a rank's device in 1e9 bytes, infinite where the device is unknown;
            None leaves memory unchecked.

    Returns:
        The config, complete as far as it has no mistakes, and a line for each mistake.
    """
    config, problems = checks.examine(config, world_size)
    if memory_gb is not None and not problems:  # sizes mean little before all fits together
        by_name = checks.degrees(config, world_size)
        checks.collect(problems, lambda: check_memory(config, by_name, memory_gb))
    return config, problems


def timeout_notes(config: Any) -> list[str]:
    """Notes on limits within which a checkpoint has to be written, on a slow file system.

    Args:
        config: A complete config.
    """
    if not config.checkpoint.enable:
        return []
    size = checkpoint_sizes(config)["checkpoint_bytes"]
    seconds = size / (DISK_GB_PER_S * 1e9)
    notes = []
    # Ranks wait for the last save, and for that of a stop, whatever the async_mode.
    limits = {
        "checkpoint.stop_seconds": config.checkpoint.stop_seconds,
        "comm.train_timeout_seconds": config.comm.train_timeout_seconds,
    }
    for field, limit in limits.items():
        if limit <= seconds:
            notes.append(
                f"{field} = {limit}: a checkpoint of {size / 1e9:.1f} GB needs more than "
                f"{size / 1e9 / limit:.1f} GB/s; at {DISK_GB_PER_S} GB/s it takes {seconds:.0f} s"
            )
    return notes
