"""Configs from a command line."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro
from torchtitan.config.manager import ConfigManager, custom_registry

from torchtitan_ext.config import files, names
from torchtitan_ext.config.checks import settle, validate
from torchtitan_ext.plugin.trainer import Trainer

__all__ = ["from_file", "load", "parse", "settle", "split_file", "validate"]

# torchtitan's rules for the types of arguments; each call would add them again.
ConfigManager.register_tyro_rules(custom_registry)

FILE = "job.config_file"
"""The option that names a TOML file."""


def parse(args: Sequence[str]) -> Trainer.Config:
    """The config of a command line.

    Args:
        args: Such as ``["--job.config_file", "x.toml", "--training.steps", "5"]``.

    Raises:
        ValueError: For a file that cannot be read, an unknown field in it, a value of a wrong type
            or a combination that cannot work.
        SystemExit: For a mistake among the arguments, already explained on standard error.
    """
    config = load(args)
    settle(config)
    validate(config)
    return config


def load(args: Sequence[str]) -> Trainer.Config:
    """The config of a command line as it stands there.

    Args:
        args: As for :func:`parse`.

    Raises:
        ValueError: For a mistake in the file, or a field that has another name.
        SystemExit: For another mistake among the arguments, already explained on standard error.
    """
    path, options = split_file(args)
    if path is not None and not path.endswith(".toml") and not Path(path).exists():
        raise ValueError(
            f"{FILE}: found {path!r}, expected a TOML file; those of the project lie in the folder "
            "configs of its sources, and the installed package has none"
        )
    config = Trainer.Config() if path is None else from_file(path)
    names.require_known(names.of_options(options))
    # All ranks read the same command line: the first one tells.
    return _over(config, options, console_outputs=os.environ.get("RANK", "0") == "0")


def from_file(path: str | Path, field: str = FILE) -> Trainer.Config:
    """The config of a TOML file and of those that it extends, read as if they were options.

    Args:
        path: The file.
        field: What errors call it.

    Raises:
        ValueError: For a file that cannot be read, an unknown field or a wrong value; names the
            file that says it.
    """
    links = files.chain(path, field)
    found = files.origins(links)

    def told(message: str) -> ValueError:
        said = re.sub(r"\W", "_", message)
        file = next((at for name, at in found.items() if re.sub(r"\W", "_", name) in said), path)
        return ValueError(f"{file}: {message}")

    errors = io.StringIO()
    try:
        names.require_known(found)
        values = files.fields(files.merged(links))
        options = [option for name, value in values for option in _options(name, value)]
        with contextlib.redirect_stderr(errors):
            # A flag takes a value then, and may so be off in a file and on in one that extends it.
            return _over(Trainer.Config(), options, tyro.conf.FlagConversionOff)
    except ValueError as error:
        raise told(str(error)) from None
    except SystemExit:
        raise told(_one_line(errors.getvalue())) from None


def _over(
    default: Trainer.Config, options: list[str], *markers: Any, console_outputs: bool = True
) -> Trainer.Config:
    """A config with options laid over it."""
    if not options:
        return default
    known = {field.name for field in dataclasses.fields(default)}
    named = {name.partition(".")[0].replace("-", "_") for name in names.of_options(options)}
    shown: Any = default
    if named and named <= known:
        # tyro takes its time for each section that it is shown, and gives advice about those alone.
        kinds = typing.get_type_hints(type(default), include_extras=True)
        sections = dataclasses.make_dataclass("Sections", [(name, kinds[name]) for name in named])
        shown = sections(**{name: getattr(default, name) for name in named})
    made: Any = tyro.cli(
        type(shown),
        prog="amo train",
        args=options,
        default=shown,
        registry=custom_registry,
        use_underscores=True,
        # Comments are no help, and the search for them takes half of the time.
        config=(tyro.conf.HelptextFromCommentsOff, *markers),
        console_outputs=console_outputs,
    )
    changes = {name: getattr(made, name) for name in (known if shown is default else named)}
    return dataclasses.replace(default, **changes)


_SEPARATE = (
    *("override.imports", "optimizer.no_decay", "optimizer.lr_multipliers", "optimizer.patterns"),
)
"""Lists whose entries are words of their own: a regular expression may hold a comma."""


def _options(name: str, value: object) -> list[str]:
    if value == []:
        raise ValueError(f"{name}: found [], expected at least one, or no such line")
    if not isinstance(value, list):
        return [f"--{name}={value}"]
    # torchtitan reads a list as one word with commas, and a list of lists as several.
    is_nested = name in _SEPARATE or isinstance(value[0], list)
    words = [",".join(map(str, one)) if isinstance(one, list) else str(one) for one in value]
    return [f"--{name}", *(words if is_nested else [",".join(words)])]


def _one_line(told: str) -> str:
    """An error of tyro's, which fills a box, as a line: what is wrong, and what comes near."""
    plain = re.sub(r"\x1b\[[\d;]*m|[│╭╮╰╯]|--(?=[a-z])", "", told)
    _, found, *more = re.split(r"[-─]{9,}", plain)
    near = re.findall(r"(?:similar to \S+|you meant):\s+(\S+)", " ".join(more))
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
    return " ".join(found.split()) + hint


def split_file(args: Sequence[str]) -> tuple[str | None, list[str]]:
    """The TOML file that arguments name, if any, and the other arguments."""
    path, rest, words = None, [], iter(args)
    for word in words:
        key, equals, value = word.partition("=")
        if key.replace("-", "_") == f"__{FILE}":
            path = value if equals else next(words, None)
        else:
            rest.append(word)
    return path, rest
