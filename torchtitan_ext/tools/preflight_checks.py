"""Checks of a config against the machines of its run: memory of a device, and time to save."""

from __future__ import annotations

from typing import Any

from torchtitan_ext.config import checks
from torchtitan_ext.tools.preflight_memory import check_memory, checkpoint_sizes

DISK_GB_PER_S = 1.0
"""Assumed rate at which all ranks together write to a shared file system."""


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


def slow_saves(config: Any) -> list[str]:
    """Notes on timeouts that end before a checkpoint is written, at an assumed rate of the disk.

    Args:
        config: A complete config.
    """
    if not config.checkpoint.enable:
        return []
    size = checkpoint_sizes(config)["checkpoint_bytes"]
    seconds = size / (DISK_GB_PER_S * 1e9)
    effect = (
        f"may end before a checkpoint of {size / 1e9:.1f} GB is written, {seconds:.0f} s at "
        f"{DISK_GB_PER_S} GB/s"
    )
    notes = []
    timeout, grace = config.comm.train_timeout_seconds, config.checkpoint.stop_seconds
    if timeout <= seconds and config.checkpoint.async_mode == "disabled":
        notes.append(
            f"comm.train_timeout_seconds = {timeout} {effect} (checkpoint.async_mode = 'async' "
            "does not wait)"
        )
    if grace <= seconds:
        notes.append(f"checkpoint.stop_seconds = {grace} {effect}")
    return notes
