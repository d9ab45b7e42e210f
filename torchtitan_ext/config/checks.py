"""What the fields of a config say about one another."""

from __future__ import annotations

import math
from typing import Any

from torchtitan_ext.data import loader
from torchtitan_ext.plugin import geometry, losses, models, optimizers
from torchtitan_ext.runs.run_files import require_local

_MOST = 10**15
"""Of steps, and of tokens in a sequence: no run comes near."""
_OTHER_AXES = ("context_parallel", "tensor_parallel", "pipeline_parallel", "expert_parallel")


def settle(config: Any) -> None:
    """Fill in what follows from other fields; idempotent.

    Raises:
        ValueError: For a learning rate or a model that cannot be told.
    """
    optimizers.settle(config.optimizer)
    if config.model_spec is None:
        config.model_spec = models.spec(config.model)
    if config.loss.global_vocab_size is None:
        config.loss.global_vocab_size = config.model_spec.model.vocab_size
    loader.settle(config)


def validate(config: Any) -> None:
    """Check the fields that depend on one another.

    Raises:
        ValueError: Naming the field, what was found and what was expected.
    """
    require_local("dump_folder", config.dump_folder)
    optimizers.validate(config.optimizer)
    _check_numbers(config.optimizer)
    check_degrees(config.parallelism)
    geometry.validate(config)
    _check_sizes(config.training)
    losses.validate(config)
    optimizers.check_lock(config.optimizer, config.training.steps)
    loader.validate(config)


def check_degrees(parallelism: Any) -> None:
    """Check that each parallel degree is one.

    Raises:
        ValueError: Naming the field.
    """
    for axis in ("data_parallel_replicate", "data_parallel_shard", *_OTHER_AXES):
        found = getattr(parallelism, f"{axis}_degree")
        if found < 1 and (axis, found) != ("data_parallel_shard", -1):
            rest = ", or -1 for all ranks that are left" if axis == "data_parallel_shard" else ""
            raise ValueError(
                f"parallelism.{axis}_degree: found {found}, expected an integer >= 1{rest}"
            )


def _check_numbers(optimizer: Any) -> None:
    for field in ("lr", "weight_decay", "eps", "beta1", "beta2"):
        found, most = getattr(optimizer, field), 1.0 if field.startswith("beta") else math.inf
        if found is not None and not 0 <= found < most:  # nor is NaN
            expected = "a finite number >= 0" if math.isinf(most) else "a number >= 0 and < 1"
            raise ValueError(f"optimizer.{field}: found {found!r}, expected {expected}")


def _check_sizes(training: Any) -> None:
    for field in ("steps", "seq_len", "local_batch_size"):
        found = getattr(training, field)
        if not 1 <= found <= _MOST:
            raise ValueError(
                f"training.{field}: found {found}, expected an integer >= 1 and <= {_MOST}"
            )
    found = training.global_batch_size
    if found < 1 and found != -1:
        raise ValueError(
            f"training.global_batch_size: found {found}, expected an integer >= 1, or -1 for "
            "local_batch_size times the data-parallel degree"
        )
