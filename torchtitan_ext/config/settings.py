"""Configs from TOML files and command lines, complete and checked."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import typing
from collections.abc import Sequence
from pathlib import Path

import tyro
from torchtitan.config.manager import ConfigManager, custom_registry

from amo_dist.tools.command import read_json_file
from torchtitan_ext.config import files, names, values
from torchtitan_ext.config.checks import complete
from torchtitan_ext.plugin import models
from torchtitan_ext.plugin.trainer import Trainer
from torchtitan_ext.runs import files as atomic
from torchtitan_ext.runs.run_files import START_FILE

__all__ = ["complete", "for_ranks", "from_file", "load", "parse", "resolve", "split_file"]

# torchtitan's rules for the types of arguments; each call would add them again.
ConfigManager.register_tyro_rules(custom_registry)

FILE = "job.config_file"
"""Option that names a TOML file."""


def resolve(
    file: str | None, options: Sequence[str], world_size: int | None = None
) -> Trainer.Config:
    """Read, complete and check a config.

    Args:
        file: TOML file; None for the defaults.
        options: Options of the command line, laid over the file, such as
            ``["--training.steps", "5"]``.
        world_size: Number of ranks; None leaves out what depends on it.

    Raises:
        ValueError: Mistake in the file, or an unknown option.
        Mistakes: All fields that do not fit together.
        SystemExit: Wrong value of an option, which tyro has explained on standard error.
    """
    return complete(_read(file, options), world_size)


def parse(args: Sequence[str], world_size: int | None = None) -> Trainer.Config:
    """Resolve the config of arguments, one of which may name the TOML file.

    Args:
        args: Arguments such as ``["--job.config_file", "x.toml", "--training.steps", "5"]``, or
            those of :func:`for_ranks`, whose config is complete.
        world_size: Number of ranks; None leaves out what depends on it.

    Raises:
        ValueError: A mistake of the user's, see :func:`resolve`.
        SystemExit: Wrong value of an option.
    """
    file, options = split_file(args)
    if file is not None and Path(file).name == START_FILE and not options:
        return _from_json(Path(file))
    return resolve(file, options, world_size)


def load(args: Sequence[str]) -> Trainer.Config:
    """Read the config of arguments without completing or checking it.

    Args:
        args: Arguments, see :func:`parse`.

    Raises:
        ValueError: A mistake of the user's, see :func:`resolve`.
        SystemExit: Wrong value of an option.
    """
    return _read(*split_file(args))


def _read(file: str | None, options: Sequence[str]) -> Trainer.Config:
    if file is not None and not file.endswith(".toml") and not Path(file).exists():
        raise ValueError(
            f"{FILE}: found {file!r}, expected a TOML file; those of the project lie in the folder "
            "configs of its sources, and the installed package has none"
        )
    config = Trainer.Config() if file is None else from_file(file)
    return _with_options(config, options) if options else config


def from_file(path: str | Path, field: str = FILE) -> Trainer.Config:
    """Read the config of a TOML file and of those that it extends.

    Args:
        path: File.
        field: Name of the file in errors.

    Raises:
        ValueError: A file cannot be read, or has an unknown field or a wrong value; the message
            names the file that sets it.
    """
    links = files.chain(path, field)
    merged = files.merged(links)
    try:
        names.require_known(name for name, _ in files.fields(merged))
        config: Trainer.Config = values.overlay(Trainer.Config(), merged)
        return config
    except ValueError as error:
        file = files.origin(links, str(error).partition(":")[0])
        raise ValueError(f"{file}: {error}") from None


def for_ranks(config: Trainer.Config) -> list[str]:
    """Write a complete config into its dump folder.

    Returns:
        The arguments by which :func:`parse` reads it back, in each rank and after each restart.
    """
    folder = Path(config.dump_folder)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / START_FILE
    # All nodes write this file at once: with one scratch file each would take the other's.
    suffix = f".{socket.gethostname()}-{os.getpid()}{atomic.SCRATCH}"
    atomic.replace(file, json.dumps(values.plain(config), indent=1) + "\n", suffix)
    return [f"--{FILE}", str(file)]


def _from_json(path: Path) -> Trainer.Config:
    config: typing.Any = values.overlay(Trainer.Config(), read_json_file(path), derived=True)
    complete_config: Trainer.Config = dataclasses.replace(
        config, model_spec=models.spec(config.model)
    )
    return complete_config


def _with_options(config: Trainer.Config, options: Sequence[str]) -> Trainer.Config:
    """Lay options of a command line over a config."""
    option_names = names.of_options(options)
    names.require_known(option_names)
    known = {field.name for field in dataclasses.fields(config)}
    sections = {name.partition(".")[0].replace("-", "_") for name in option_names}
    is_part = bool(sections) and sections <= known
    shown: typing.Any = config
    if is_part:
        # tyro takes its time for each section that it is shown, and gives advice about those alone.
        kinds = typing.get_type_hints(type(config), include_extras=True)
        parts = [(name, kinds[name]) for name in sections]
        part: typing.Any = dataclasses.make_dataclass("Sections", parts)
        shown = part(**{name: getattr(config, name) for name in sections})
    parsed: typing.Any = tyro.cli(
        type(shown),
        prog="amo train",
        args=options,
        default=shown,
        registry=custom_registry,
        use_underscores=True,
        # Comments are no help, and the search for them takes half of the time.
        config=(tyro.conf.HelptextFromCommentsOff,),
        # All ranks read the same command line: the first one prints.
        console_outputs=os.environ.get("RANK", "0") == "0",
    )
    if not is_part:
        return typing.cast(Trainer.Config, parsed)
    return dataclasses.replace(config, **{name: getattr(parsed, name) for name in sections})


def split_file(args: Sequence[str]) -> tuple[str | None, list[str]]:
    """Split arguments into the TOML file that they name, if any, and the others."""
    path, others, words = None, [], iter(args)
    for word in words:
        key, equals, value = word.partition("=")
        if key.replace("-", "_") == f"__{FILE}":
            path = value if equals else next(words, None)
        else:
            others.append(word)
    return path, others
