"""What follows from the fields of a config, and whether they fit together and this machine."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from torchtitan.distributed import ParallelDims

from torchtitan_ext.config.values import overlay
from torchtitan_ext.data import loader
from torchtitan_ext.plugin import losses, models, optimizers
from torchtitan_ext.runs.run_files import require_local

_T = TypeVar("_T")

# Least value of a number, and the value that it stays below.
_RANGES = {
    **dict.fromkeys(
        ("training.steps", "training.seq_len", "training.local_batch_size", "validator.freq"),
        (1, math.inf),
    ),
    **dict.fromkeys(("optimizer.lr", "optimizer.weight_decay", "optimizer.eps"), (0, math.inf)),
    **dict.fromkeys(("optimizer.beta1", "optimizer.beta2"), (0, 1)),
}


def complete(config: _T, world_size: int | None = None) -> _T:
    """Fill in what follows from other fields, and check that all fit together.

    Args:
        config: Config of :class:`torchtitan_ext.plugin.trainer.Trainer`; stays as it is.
        world_size: Number of ranks; None leaves out what depends on it.

    Returns:
        The complete config; completing it again changes nothing.

    Raises:
        ValueError: Every mistake, a line for each, with its field, what was found and what was
            expected.
    """
    config, problems = validate_config(config, world_size)
    if problems:
        raise ValueError("\n".join(problems))
    return config


def validate_config(config: Any, world_size: int | None = None) -> tuple[Any, list[str]]:
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
    )
    loader_fields = {"positions": config.model.attention != "sdpa"}
    derived: dict[str, Any] = {
        "dataloader": loader_fields,
        "validator": {"dataloader": loader_fields},
    }
    if config.model_spec is not None and config.loss.global_vocab_size is None:
        derived["loss"] = {"global_vocab_size": config.model_spec.model.vocab_size}
    config = overlay(config, derived)
    checks: list[Callable[[], object]] = [
        lambda: require_local("dump_folder", config.dump_folder),
        lambda: _check_ranges(config),
        lambda: losses.validate(config),
        lambda: optimizers.check_lock(config.optimizer, config.training.steps),
        lambda: loader.check(config.dataloader),
    ]
    if config.validator.enable:
        checks.append(lambda: loader.check(config.validator.dataloader))
    if world_size is not None:
        checks.append(lambda: check_batch(config, world_size))
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


def degrees(config: Any, world_size: int) -> ParallelDims:
    """Parallel degrees; that of sharding is what the others leave.

    Raises:
        ValueError: A degree is below 1, or their product is not the size of the world.
    """
    try:
        return ParallelDims.from_config(config.parallelism, world_size)
    except AssertionError as error:
        raise ValueError(f"parallelism: {error}") from None


def check_batch(config: Any, world_size: int) -> None:
    """Check that the parallel degrees and the batch fit a number of ranks.

    Raises:
        ValueError: Naming the field.
    """
    dims, training = degrees(config, world_size), config.training
    num_data_ranks = dims.dp_replicate * dims.dp_shard
    size, least = training.global_batch_size, training.local_batch_size * num_data_ranks
    if size != -1 and (size < 1 or (least > 0 and size % least)):
        raise ValueError(
            f"training.global_batch_size: found {size}, expected a multiple of {least}: "
            f"local_batch_size {training.local_batch_size} on {num_data_ranks} data-parallel "
            "ranks, or -1 for just that"
        )


def _check_ranges(config: Any) -> None:
    for field, (least, most) in _RANGES.items():
        value = operator.attrgetter(field)(config)
        if value is not None and not least <= value < most:  # nor is NaN
            raise ValueError(f"{field}: found {value!r}, expected a number >= {least} and < {most}")


def missing_on_this_machine(config: Any) -> list[str]:
    """Check that the machine that starts a run has its tokenizer and data; a line for each lack.

    Args:
        config: A checked config.
    """
    problems: list[str] = []
    tokenizer = collect(problems, lambda: _tokenizer(config))
    loaders = [config.dataloader]
    if config.validator.enable:
        loaders.append(config.validator.dataloader)
    for section in loaders:
        if section.dataset == "packed" and tokenizer is not None:
            collect(problems, functools.partial(loader.open_corpora, section, tokenizer))
    return problems


def _tokenizer(config: Any) -> Any:
    """The tokenizer, which must be there and fit the model.

    Raises:
        ValueError: Otherwise.
    """
    section, model = config.tokenizer, config.model_spec.model
    path = section.path or config.hf_assets_path
    if section.kind == "hf" and not Path(path).expanduser().exists():
        field = "tokenizer.path" if section.path else "hf_assets_path"
        raise ValueError(f"{field}: found no tokenizer in {path} on this machine, expected one")
    tokenizer = section.build(tokenizer_path=config.hf_assets_path)
    if (num_tokens := tokenizer.get_vocab_size()) > model.vocab_size:
        raise ValueError(
            f"model.flavor: found {config.model.flavor!r} with a vocabulary of {model.vocab_size} "
            f"tokens, expected at least the {num_tokens} of the tokenizer ({section.kind!r})"
        )
    return tokenizer
