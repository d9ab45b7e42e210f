"""Train specs with the project's parts in them, under torchtitan's names."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torchtitan.components.optimizer as titan_optimizer
import torchtitan.protocols.train_spec as titan
from torchtitan.components.tokenizer import BaseTokenizer

from torchtitan_ext.data import tokenizers
from torchtitan_ext.data.loader import build_dataloader
from torchtitan_ext.plugin import (
    lr_schedulers,
    metrics,
    models,
    optimizers,
    parallelize,
    settings,
)

MODELS = ("llama3", "qwen3", "llama4", "deepseek_v3")
"""Names under which torchtitan finds the project's specs instead of its own."""

_registered: set[str] = set()


def register() -> None:
    """Register every model of :data:`MODELS`; a no-op when repeated.

    Raises:
        ValueError: If another extension has registered one of the names.
    """
    for name in MODELS:
        if name not in _registered:
            titan.register_train_spec(name, extended_spec(name, models.flavors(name)))
            _registered.add(name)


def extended_spec(name: str, flavors: Mapping[str, Any]) -> titan.TrainSpec:
    """The spec of a torchtitan model with the project's flavors, optimizers, data and metrics."""
    stock = titan.get_train_spec(name)
    # A spec that balances the load of experts through its optimizers goes on doing so.
    balances = stock.build_optimizers_fn is titan_optimizer.build_optimizers_with_moe_load_balancing
    build_optimizers = (
        optimizers.build_optimizers_with_moe_load_balancing
        if balances
        else optimizers.build_optimizers
    )
    return dataclasses.replace(
        stock,
        model_cls=models.with_init(stock.model_cls),
        model_args={**stock.model_args, **flavors},
        parallelize_fn=functools.partial(parallelize.parallelize, stock.parallelize_fn),
        build_loss_fn=functools.partial(parallelize.build_loss, stock.build_loss_fn),
        build_optimizers_fn=build_optimizers,
        build_lr_schedulers_fn=functools.partial(
            lr_schedulers.build_lr_schedulers, stock.build_lr_schedulers_fn
        ),
        build_tokenizer_fn=build_tokenizer,
        build_dataloader_fn=build_dataloader,
        build_metrics_processor_fn=metrics.build_metrics_processor,
    )


def build_tokenizer(job_config: Any) -> BaseTokenizer:
    """The tokenizer that ``[data] tokenizer`` names.

    Raises:
        ValueError: For a config that cannot work: this is the first of the project's functions that
            torchtitan calls with the whole of it.
    """
    settings.validate(job_config)
    return tokenizers.build_tokenizer(job_config)
