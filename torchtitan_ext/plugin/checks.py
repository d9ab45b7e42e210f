"""What the fields of a config say about one another."""

from __future__ import annotations

from typing import Any

from torchtitan_ext import learning_rate
from torchtitan_ext.data import loader
from torchtitan_ext.plugin import geometry, losses, models, optimizers, sections


def settle(config: Any) -> None:
    """Fill in what follows from other fields; idempotent.

    Raises:
        ValueError: For a learning rate or a model that cannot be told.
    """
    given = sections.given_here(config.given)
    sections.settle(config.optimizer, given)
    learning_rate.resolve(config.optimizer, given)
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
    optimizers.validate(config.optimizer, sections.given_here(config.given))
    geometry.validate(config)
    _check_sizes(config.training)
    loader.validate(config)
    losses.validate(config)
    optimizers.check_lock(config.optimizer, config.training.steps)


def _check_sizes(training: Any) -> None:
    for field in ("steps", "seq_len", "local_batch_size"):
        found = getattr(training, field)
        if found < 1:
            raise ValueError(f"training.{field}: found {found}, expected an integer >= 1")
    found = training.global_batch_size
    if found < 1 and found != -1:
        raise ValueError(
            f"training.global_batch_size: found {found}, expected an integer >= 1, or -1 for "
            "local_batch_size times the data-parallel degree"
        )
