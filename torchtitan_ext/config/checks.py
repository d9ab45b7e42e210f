"""What follows from the fields of a config, and whether they fit together."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from amo_dist.tools.command import Mistakes
from torchtitan_ext.data import loader
from torchtitan_ext.plugin import geometry, losses, models, optimizers
from torchtitan_ext.runs.run_files import require_local

_T = TypeVar("_T")

_MOST = 10**15
"""Most steps, and most tokens of a sequence: no run comes near."""


def complete(config: _T, world_size: int | None = None) -> _T:
    """Fill in what follows from other fields, and check that all fit together.

    Args:
        config: Config of :class:`torchtitan_ext.plugin.trainer.Trainer`; stays as it is.
        world_size: Number of ranks; None leaves out what depends on it.

    Returns:
        The complete config; completing it again changes nothing.

    Raises:
        Mistakes: Every mistake, each with its field, what was found and what was expected.
    """
    config, problems = examine(config, world_size)
    if problems:
        raise Mistakes(problems)
    return config


def examine(config: Any, world_size: int | None = None) -> tuple[Any, list[str]]:
    """Complete a config as far as possible.

    Args:
        config: Config of the trainer; stays as it is.
        world_size: Number of ranks; None leaves out what depends on it.

    Returns:
        The config, and a line for each mistake.
    """
    problems: list[str] = []
    config = dataclasses.replace(
        config,
        optimizer=collect(problems, lambda: optimizers.resolved(config.optimizer))
        or config.optimizer,
        model_spec=config.model_spec or collect(problems, lambda: models.spec(config.model)),
        dataloader=_loader(config.dataloader, config),
        validator=dataclasses.replace(
            config.validator, dataloader=_loader(config.validator.dataloader, config)
        ),
    )
    if config.model_spec is not None and config.loss.global_vocab_size is None:
        size = config.model_spec.model.vocab_size
        config = dataclasses.replace(
            config, loss=dataclasses.replace(config.loss, global_vocab_size=size)
        )
    checks: list[Callable[[], object]] = [
        lambda: require_local("dump_folder", config.dump_folder),
        lambda: _check_numbers(config.optimizer),
        lambda: check_degrees(config.parallelism),
        lambda: geometry.validate(config),
        lambda: _check_sizes(config.training),
        lambda: losses.validate(config),
        lambda: optimizers.check_lock(config.optimizer, config.training.steps),
        lambda: loader.validate(config),
    ]
    if world_size is not None:
        checks += [lambda: check_batch(config, world_size), lambda: _check_warmup(config)]
    for check in checks:
        collect(problems, check)
    return config, list(dict.fromkeys(problems))


def collect(problems: list[str], check: Callable[[], Any]) -> Any:
    """Run a check; append the message of its ``ValueError``, and return None then."""
    try:
        return check()
    except ValueError as error:
        problems.append(str(error))
    return None


def degrees(config: Any, world_size: int) -> dict[str, int]:
    """Parallel degrees by name; that of sharding is what the others leave.

    Raises:
        ValueError: A degree is below 1, or their product is not the size of the world.
    """
    parallelism = config.parallelism
    check_degrees(parallelism)
    by_name = {
        "replicate": parallelism.data_parallel_replicate_degree,
        "shard": parallelism.data_parallel_shard_degree,
        "cp": parallelism.context_parallel_degree,
        "tp": parallelism.tensor_parallel_degree,
        "pp": parallelism.pipeline_parallel_degree,
    }
    others = math.prod(degree for name, degree in by_name.items() if name != "shard")
    if by_name["shard"] == -1:
        by_name["shard"] = max(world_size // others, 1)
    if others * by_name["shard"] != world_size:
        product = " * ".join(f"{name} {degree}" for name, degree in by_name.items())
        raise ValueError(f"parallelism: found {product}, expected a product of {world_size} ranks")
    return by_name


def check_degrees(parallelism: Any) -> None:
    """Check that each parallel degree is positive.

    Raises:
        ValueError: Naming the field.
    """
    axes = ("data_parallel_replicate", "data_parallel_shard", "context_parallel")
    for axis in (*axes, "tensor_parallel", "pipeline_parallel", "expert_parallel"):
        degree = getattr(parallelism, f"{axis}_degree")
        if degree < 1 and (axis, degree) != ("data_parallel_shard", -1):
            hint = ", or -1 for all remaining ranks" if axis == "data_parallel_shard" else ""
            raise ValueError(
                f"parallelism.{axis}_degree: found {degree}, expected an integer >= 1{hint}"
            )


def check_batch(config: Any, world_size: int) -> None:
    """Check that the parallel degrees and the batch fit a number of ranks.

    Raises:
        ValueError: Naming the field.
    """
    by_name, training = degrees(config, world_size), config.training
    num_data_ranks = by_name["replicate"] * by_name["shard"]
    least = training.local_batch_size * num_data_ranks
    if training.global_batch_size >= 0 and least > 0 and training.global_batch_size % least:
        raise ValueError(
            f"training.global_batch_size: found {training.global_batch_size}, expected a multiple "
            f"of {least}: local_batch_size {training.local_batch_size} on {num_data_ranks} "
            "data-parallel ranks"
        )


def _loader(section: Any, config: Any) -> Any:
    return dataclasses.replace(
        section,
        positions=config.model.attention != "sdpa",
        tokens=section.tokens or str(Path(config.dump_folder).parent / "tokens"),
    )


def _check_numbers(optimizer: Any) -> None:
    for field in ("lr", "weight_decay", "eps", "beta1", "beta2"):
        value, most = getattr(optimizer, field), 1.0 if field.startswith("beta") else math.inf
        if value is not None and not 0 <= value < most:  # nor is NaN
            expected = "a finite number >= 0" if math.isinf(most) else "a number >= 0 and < 1"
            raise ValueError(f"optimizer.{field}: found {value!r}, expected {expected}")


def _check_sizes(training: Any) -> None:
    for field in ("steps", "seq_len", "local_batch_size"):
        size = getattr(training, field)
        if not 1 <= size <= _MOST:
            raise ValueError(
                f"training.{field}: found {size}, expected an integer >= 1 and <= {_MOST}"
            )
    size = training.global_batch_size
    if size < 1 and size != -1:
        raise ValueError(
            f"training.global_batch_size: found {size}, expected an integer >= 1, or -1 for "
            "local_batch_size times the data-parallel degree"
        )


def _check_warmup(config: Any) -> None:
    schedule, steps = config.lr_scheduler, config.training.steps
    total = schedule.total_steps or steps
    if schedule.warmup_steps > total > 0:
        raise ValueError(
            f"lr_scheduler.warmup_steps: found {schedule.warmup_steps}, expected at most the "
            f"{total} steps of the schedule"
        )
