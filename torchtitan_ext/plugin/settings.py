"""Configs from a command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import tyro
from torchtitan.config.manager import ConfigManager, custom_registry

from amo_dist.schedule.schedule_file import read_toml
from torchtitan_ext.plugin import toml_config
from torchtitan_ext.plugin.checks import settle, validate
from torchtitan_ext.plugin.trainer import Trainer

__all__ = ["argument", "load", "parse", "settle", "validate"]


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
    path = argument(args, "job.config_file")
    if path is not None and not path.endswith(".toml") and not Path(path).exists():
        raise ValueError(
            f"job.config_file: found {path!r}, expected a TOML file; those of the project lie in "
            "the folder configs of its sources, and the installed package has none"
        )
    values = {} if path is None else read_toml("job.config_file", path)
    config, problems = toml_config.read(values, args)
    ConfigManager()  # which makes torchtitan's rules for the types of arguments known
    config = tyro.cli(
        type(config),
        prog="amo train",
        args=_renamed(args),
        default=config,
        registry=custom_registry,
        console_outputs=_is_first_rank(),  # all read the same command line
    )
    return config, problems


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
    found: list[str] = []
    rest = iter(args)
    for arg in rest:
        option, equals, value = arg.partition("=")
        name = option.removeprefix("--").replace("-", "_")
        section, dot, field = name.rpartition(".")
        off = "no_" if field.startswith("no_") else ""
        head, dot, tail = toml_config.moved(section + dot + field.removeprefix(off)).rpartition(".")
        new = f"{head}{dot}{off}{tail}"
        if name == "job.config_file" or name in toml_config.IGNORED:
            value = value if equals else next(rest, "")
            if name in toml_config.IGNORED and value != toml_config.IGNORED[name]:
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
