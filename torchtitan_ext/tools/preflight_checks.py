"""Everything that is wrong with a config, at once, before any rank starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchtitan_ext.config import checks, settings
from torchtitan_ext.data import loader
from torchtitan_ext.plugin import models
from torchtitan_ext.tools.preflight_memory import check_memory, checkpoint_sizes

DISK_GB_PER_S = 1.0
"""Write speed that notes assume of a shared file system; real ones write 1 to 100 times as fast."""


def config_file(args: Sequence[str]) -> str:
    """The TOML file that arguments name.

    Raises:
        ValueError: If they name none.
    """
    path, _ = settings.split_file(args)
    if path is None:
        raise ValueError("FILE: found none, expected a TOML file")
    return path


def load(args: Sequence[str]) -> Any:
    """The config of torchtitan's arguments.

    Raises:
        ValueError: If there is no config file, or for a mistake in it.
        SystemExit: For a mistake among the arguments, already explained on standard error.
    """
    config_file(args)
    return settings.load(args)


def check(config: Any, world_size: int, memory_gb: float | None = None) -> list[str]:
    """Mistakes in how the fields of a config fit together, and with a world.

    Args:
        config: From :func:`load`; what follows from other fields is filled in.
        world_size: Number of ranks.
        memory_gb: Of a rank's device, in 1e9 bytes, where memory and disk are to be looked at;
            infinite where the device is not known.

    Returns:
        One line for each mistake.
    """
    problems: list[str] = []
    each: list[Callable[[], object]] = [
        lambda: checks.settle(config),
        lambda: checks.validate(config),
        # What follows from the model alone: a rate that cannot be told hides no unknown flavor.
        lambda: models.spec(config.model),
        # Where the degrees do not fit, each of these two tells so: once is enough.
        lambda: _check_batch(config, degrees(config, world_size)),
        lambda: loader.validate(config),
        lambda: _check_schedule(config),
    ]
    for one in each:
        collect(problems, one)
    if memory_gb is not None and not problems:  # for what fits together otherwise
        collect(problems, lambda: check_memory(config, degrees(config, world_size), memory_gb))
    return list(dict.fromkeys(problems))


def collect(problems: list[str], check: Callable[[], Any]) -> Any:
    """What a check gives; where it finds a mistake ``None``, and the mistake is noted."""
    try:
        return check()
    except ValueError as error:
        problems.append(str(error))
    return None


def degrees(config: Any, world_size: int) -> dict[str, int]:
    """Parallel degrees by name; the degree of sharding is what the others leave.

    Raises:
        ValueError: If a degree is none, or they do not multiply to the size of the world.
    """
    parallelism = config.parallelism
    checks.check_degrees(parallelism)
    found = {
        "replicate": parallelism.data_parallel_replicate_degree,
        "shard": parallelism.data_parallel_shard_degree,
        "cp": parallelism.context_parallel_degree,
        "tp": parallelism.tensor_parallel_degree,
        "pp": parallelism.pipeline_parallel_degree,
    }
    rest = 1
    for name, degree in found.items():
        if name != "shard":
            rest *= degree
    if found["shard"] == -1:
        found["shard"] = max(world_size // rest, 1)
    if rest * found["shard"] != world_size:
        product = " * ".join(f"{name} {degree}" for name, degree in found.items())
        raise ValueError(f"parallelism: found {product}, expected a product of {world_size} ranks")
    return found


# ------------------------------------------------------------------ how fields fit together


def _check_batch(config: Any, found: Mapping[str, int]) -> None:
    training, num_data_ranks = config.training, found["replicate"] * found["shard"]
    one = training.local_batch_size * num_data_ranks
    if training.global_batch_size >= 0 and training.global_batch_size % one:
        raise ValueError(
            f"training.global_batch_size: found {training.global_batch_size}, expected a multiple "
            f"of {one}: local_batch_size {training.local_batch_size} on {num_data_ranks} "
            "data-parallel ranks"
        )


def timeout_notes(config: Any) -> list[str]:
    """Notes on limits within which a checkpoint has to be written, on a slow file system."""
    if not config.checkpoint.enable:
        return []
    size = checkpoint_sizes(config)["checkpoint_bytes"]
    seconds = size / (DISK_GB_PER_S * 1e9)
    notes = []
    # With every async_mode the last save, and that of a stop, is one that ranks wait for.
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


def _check_schedule(config: Any) -> None:
    schedule, steps = config.lr_scheduler, config.training.steps
    total = schedule.total_steps or steps
    if schedule.warmup_steps > total:
        raise ValueError(
            f"lr_scheduler.warmup_steps: found {schedule.warmup_steps}, expected at most the "
            f"{total} steps of the schedule"
        )
