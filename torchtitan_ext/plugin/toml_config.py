"""TOML files as configs of the trainer, each value checked by itself."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torchtitan_ext.plugin.trainer import Trainer

MOVED = {
    "job.dump_folder": "dump_folder",
    "job.description": "description",
    "job.print_config": "debug.print_config",
    "job.save_config_file": "debug.save_config_file",
    "model.hf_assets_path": "hf_assets_path",
    "training.dataset": "dataloader.dataset",
    "training.dataset_path": "dataloader.dataset_path",
    "training.dataloader": "dataloader",
    "data": "dataloader",
    "data.tokenizer": "tokenizer.kind",
    "data.tokenizer_path": "tokenizer.path",
    "data.eos_token": "tokenizer.eos_token",
    "validation": "validator",
    "validation.dataset": "validator.dataloader.dataset",
    "validation.dataset_path": "validator.dataloader.dataset_path",
    "profiling": "profiler",
    "parallelism.enable_async_tensor_parallel": "compile.enable_async_tensor_parallel",
}
"""Where fields of a file, and whole sections, stand in the trainer's config."""

IGNORED = {
    "job.custom_config_module": "torchtitan_ext.job_config",
    "experimental.custom_import": "torchtitan_ext",
}
"""Values without effect: a config needs no mention of this package. Of others it is unknown."""


def moved(key: str) -> str:
    """The dotted path in the trainer's config of a field of a file.

    >>> moved("data.seed"), moved("data.tokenizer"), moved("optimizer.lr")
    ('dataloader.seed', 'tokenizer.kind', 'optimizer.lr')
    """
    head, tail = key, ""
    while head not in MOVED and "." in head:
        head, _, last = head.rpartition(".")
        tail = f".{last}{tail}"
    return MOVED.get(head, head) + tail


def given_fields(values: Mapping[str, Any], args: Sequence[str] = ()) -> set[str]:
    """Fields that a file or arguments name, by their dotted paths in the trainer's config.

    A field may be given the value that is its default: only where it stands tells.

    Args:
        values: Sections of the file.
        args: Of the command line.
    """
    found = {moved(key) for key, _ in _leaves(values)}
    for arg in args:
        option = arg.partition("=")[0].replace("-", "_")
        if option.startswith("__"):
            section, dot, field = option.removeprefix("__").rpartition(".")
            found.add(moved(section + dot + field.removeprefix("no_")))  # as flags are turned off
    return found


def read(values: Mapping[str, Any], args: Sequence[str] = ()) -> tuple[Trainer.Config, list[str]]:
    """The config of a file, and one line for each mistake.

    A field with a mistake (unknown, of a wrong type, at odds with others of its section) is left
    at its default.

    Args:
        values: Sections of the file.
        args: What will be laid over the result; here, only that these fields are given counts.
    """
    given = tuple(sorted(given_fields(values, args)))
    config, problems = Trainer.Config(given=given), list[str]()
    tree: dict[str, Any] = {}
    for key, value in _leaves(values):
        if key in IGNORED and value == IGNORED[key]:
            continue
        try:
            _check(config, key, value)
        except ValueError as error:
            problems.append(str(error))
        else:
            *path, name = moved(key).split(".")
            branch = tree
            for section in path:
                branch = branch.setdefault(section, {})
            if name in branch:
                problems.append(
                    f"{key}: found this field under another name, too; expected it once"
                )
            branch[name] = value
    return _replaced(config, tree, "", problems), problems


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _check(config: Trainer.Config, key: str, value: object) -> None:
    """Check that there is a field, and the type of its value.

    Raises:
        ValueError: Otherwise, with the nearest field that there is.
    """
    section: Any = config
    *path, name = moved(key).split(".")
    for one in path:
        section = getattr(section, one, None)
    hints = typing.get_type_hints(type(section)) if dataclasses.is_dataclass(section) else {}
    if name not in hints:
        raise ValueError(f"{key}: unknown field; {_suggestion(config, key)}")
    if not _matches(value, hints[name]):
        raise ValueError(f"{key}: found {value!r}, expected {_describe(hints[name])}")


def _suggestion(config: Trainer.Config, key: str) -> str:
    new = [*_names(config)]
    old = [
        before + path.removeprefix(after)
        for before, after in MOVED.items()
        for path in new
        if f"{path}.".startswith(f"{after}.")
    ]
    if near := difflib.get_close_matches(key, [*old, *new], n=1):
        return f"did you mean {near[0]!r}?"
    return f"known: {', '.join(sorted({name.partition('.')[0] for name in [*old, *new]}))}"


def _names(section: Any, prefix: str = "") -> Iterator[str]:
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from _names(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def _replaced(section: Any, values: Mapping[str, Any], where: str, problems: list[str]) -> Any:
    """A section with other values: all of them at once, as a section may check how they agree."""
    changes = {
        name: _replaced(getattr(section, name), value, f"{where}.{name}".lstrip("."), problems)
        if isinstance(value, Mapping)
        else value
        for name, value in values.items()
    }
    while True:
        try:
            return dataclasses.replace(section, **changes)
        except (ValueError, AssertionError) as error:
            in_files = {new: old for old, new in MOVED.items() if "." not in old}
            problems.append(f"[{in_files.get(where, where)}] {error}" if where else str(error))
            field = str(error).partition(":")[0]
            if field not in changes:  # at odds with a default: nothing to drop
                return section
            del changes[field]


def _matches(value: object, expected: Any) -> bool:
    origin, parameters = typing.get_origin(expected), typing.get_args(expected)
    if origin in (typing.Union, types.UnionType):
        return any(_matches(value, one) for one in parameters)
    if origin is typing.Literal:
        return value in parameters
    if origin is list:
        return isinstance(value, list) and all(_matches(one, parameters[0]) for one in value)
    if expected is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if expected is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return not isinstance(expected, type) or isinstance(value, expected)


def _describe(expected: Any) -> str:
    if typing.get_origin(expected) is typing.Literal:
        return f"one of {', '.join(map(repr, typing.get_args(expected)))}"
    if dataclasses.is_dataclass(expected):
        return "a section"
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
    return names.get(expected, str(expected))
