"""Configs from TOML files and command lines, complete and checked."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import socket
import typing
from collections.abc import Sequence
from pathlib import Path

import tyro
from torchtitan.config.manager import ConfigManager, custom_registry

from torchtitan_ext.config import files, values
from torchtitan_ext.config.checks import complete
from torchtitan_ext.environment import is_torchruns
from torchtitan_ext.plugin import models
from torchtitan_ext.plugin.trainer import Trainer
from torchtitan_ext.runs import files as atomic
from torchtitan_ext.runs.run_files import START_FILE

# torchtitan's rules for the types of arguments; each call would add them again.
ConfigManager.register_tyro_rules(custom_registry)

FILE = "job.config_file"
"""Option that names a TOML file."""


def parse(args: Sequence[str], world_size: int | None = None) -> Trainer.Config:
    """Read, complete and check the config of arguments, one of which may name a TOML file.

    Args:
        args: Arguments such as ``["--job.config_file", "x.toml", "--training.steps", "5"]``, or
            those of :func:`for_ranks`, whose config is complete.
        world_size: Number of ranks; None leaves out what depends on it.

    Raises:
        ValueError: Mistake in the file, or all fields that do not fit together, a line for each.
        SystemExit: Wrong option, which tyro has explained on standard error.
    """
    file, _ = _split_file(args)
    if file is None or Path(file).name != START_FILE:
        config, problems = load(args)
        return complete(config, world_size, problems)
    sections = atomic.read_json(file)
    if not isinstance(sections, dict):
        raise ValueError(f"{file}: found {type(sections).__name__}, expected sections")
    config = values.overlay(Trainer.Config(), sections)
    return dataclasses.replace(config, model_spec=models.spec(config.model))  # type: ignore[no-any-return]


def load(args: Sequence[str]) -> tuple[Trainer.Config, list[str]]:
    """Read the config of arguments without completing it.

    Args:
        args: Arguments, see :func:`parse`.

    Returns:
        The config, and a line for each value that it does not take.

    Raises:
        ValueError: The file cannot be read.
        SystemExit: Wrong option, see :func:`parse`.
    """
    file, options = _split_file(args)
    config, problems = (Trainer.Config(), []) if file is None else from_file(file)
    if not options:
        return config, problems
    with values.unchecked(config):
        parsed: typing.Any = tyro.cli(
            Trainer.Config,
            prog="amo train",
            args=options,
            default=config,
            registry=custom_registry,
            use_underscores=True,
            # Comments are no help, and the search for them takes half of the time.
            config=(tyro.conf.HelptextFromCommentsOff,),
            # All ranks read the same command line: the first one prints.
            console_outputs=os.environ.get("RANK", "0") == "0" or not is_torchruns(),
        )
    return values.overlaid(config, values.changed(config, parsed), problems), problems


def from_file(path: str | Path, field: str = FILE) -> tuple[Trainer.Config, list[str]]:
    """Read the config of a TOML file and of those that it extends.

    Args:
        path: File.
        field: Name of the file in errors.

    Returns:
        The config, and a line for each field that does not exist or has a wrong value.

    Raises:
        ValueError: A file cannot be read.
    """
    sections = files.read(path, field)
    problems: list[str] = []
    try:
        config = values.overlaid(Trainer.Config(), sections, problems)
    except RecursionError as error:
        raise ValueError(f"{path}: {atomic.reason(error)}") from None
    return config, [f"{path}: {problem}" for problem in problems]


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


def _split_file(args: Sequence[str]) -> tuple[str | None, list[str]]:
    """Split arguments into the TOML file that they name, if any, and the others."""
    parser = argparse.ArgumentParser(prog="amo train", add_help=False, allow_abbrev=False)
    parser.add_argument(f"--{FILE}", dest="file")
    known, others = parser.parse_known_args(args)
    return known.file, others
