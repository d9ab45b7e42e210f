"""The config: read from a command line, settled, and checked as a whole."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tyro
from torchtitan.config.manager import ConfigManager, custom_registry

from amo_dist.schedule.schedule_file import read_toml
from torchtitan_ext import learning_rate
from torchtitan_ext.data import loader
from torchtitan_ext.plugin import geometry, losses, models, optimizers, sections

if TYPE_CHECKING:
    from torchtitan_ext.plugin.trainer import Trainer


def parse(args: Sequence[str]) -> Trainer.Config:
    """The config of a command line.

    Args:
        args: Such as ``["--job.config_file", "x.toml", "--training.steps", "5"]``. Names of fields
            may be those of files: ``--training.dataset`` for ``--dataloader.dataset``.

    Raises:
        ValueError: For a file that cannot be read, an unknown field, a value of a wrong type or a
            combination that cannot work.
        SystemExit: For a mistake among the arguments, already explained on standard error.
    """
    config, problems = load(args)
    if problems:
        raise ValueError(problems[0])
    settle(config)
    validate(config)
    return config


def load(args: Sequence[str]) -> tuple[Trainer.Config, list[str]]:
    """The config of a command line as it stands there, and one line for each mistake in its file.

    Args:
        args: As for :func:`parse`.

    Raises:
        ValueError: If there is no file of that name, or it is not TOML.
        SystemExit: For a mistake among the arguments, already explained on standard error.
    """
    from torchtitan_ext.plugin import toml_config  # it needs the trainer, which needs this

    path = argument(args, "job.config_file")
    values = {} if path is None else read_toml("job.config_file", path)
    config, problems = toml_config.read(values, args)
    ConfigManager()  # which makes torchtitan's rules for the types of arguments known
    config = tyro.cli(
        type(config),
        args=_renamed(args),
        default=config,
        registry=custom_registry,
        console_outputs=_is_first_rank(),  # all read the same command line
    )
    return config, problems


def settle(config: Trainer.Config) -> None:
    """Fill in what follows from other fields; idempotent.

    Raises:
        ValueError: For a learning rate or a model that cannot be told.
    """
    sections.settle(config.optimizer, config.given or None)
    learning_rate.resolve(config.optimizer)
    if config.model_spec is None:
        config.model_spec = models.spec(config.model)
    if config.loss.global_vocab_size is None:
        config.loss.global_vocab_size = config.model_spec.model.vocab_size
    loader.settle(config)


def validate(config: Trainer.Config) -> None:
    """Check the fields that depend on one another.

    Raises:
        ValueError: Naming the field, what was found and what was expected.
    """
    optimizers.validate(config.optimizer)
    geometry.validate(config)
    _check_sizes(config.training)
    loader.validate(config)
    losses.validate(config)
    if config.optimizer.name != "AMO" or config.optimizer.allow_unlocked:
        return
    if config.optimizer.amo.observe_only:  # which has no plan to lock
        return
    lock_step, steps = config.optimizer.amo.lock_step, config.training.steps
    if steps < lock_step:
        raise ValueError(
            f"training.steps: found {steps}, expected at least observe_until + transition_steps = "
            f"{lock_step} of [optimizer.amo], where the plan locks "
            "(or optimizer.allow_unlocked = true)"
        )


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


def argument(args: Sequence[str], name: str) -> str | None:
    """The value of ``--name value`` or ``--name=value``, with either ``_`` or ``-``."""
    for index, arg in enumerate(args):
        key, equals, value = arg.partition("=")
        if key.replace("-", "_") == f"__{name}":
            return value if equals else (args[index + 1] if index + 1 < len(args) else None)
    return None


def _renamed(args: Sequence[str]) -> list[str]:
    """Arguments by the names of the config, without those that name its file or mean nothing.

    The first rank tells of each that has another name now.
    """
    from torchtitan_ext.plugin.toml_config import IGNORED, moved

    found: list[str] = []
    rest = iter(args)
    for arg in rest:
        option, equals, value = arg.partition("=")
        name = option.removeprefix("--").replace("-", "_")
        section, dot, field = name.rpartition(".")
        off = "no_" if field.startswith("no_") else ""
        head, dot, tail = moved(section + dot + field.removeprefix(off)).rpartition(".")
        new = f"{head}{dot}{off}{tail}"
        if name == "job.config_file" or name in IGNORED:
            value = value if equals else next(rest, "")
            if name in IGNORED and value != IGNORED[name]:
                found += [option, value]
        elif option.startswith("--") and new != name:
            if _is_first_rank():
                print(f"note: --{name} is --{new} now", file=sys.stderr, flush=True)
            found.append(f"--{new}{equals}{value}")
        else:
            found.append(arg)
    return found


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"
