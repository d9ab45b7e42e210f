"""Config dataclasses from the plain values of TOML and JSON, and back."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NoReturn, Union

import tyro
from torchtitan.config.override import OverrideImport, parse_cli_imports

from amo_dist.schedule.fields import fail

_LONGEST_NAME = 60
"""Characters of an unknown name that are compared with known ones: the comparison is quadratic."""


def overlay(
    config: Any, values: Mapping[str, Any], section: str = "", derived: bool = False
) -> Any:
    """Lay plain values over a config.

    Args:
        config: Dataclass whose fields are the defaults; stays as it is.
        values: Values by field; those of a section are a mapping in turn.
        section: Prefix of field names in errors, such as ``optimizer.``.
        derived: Whether fields that follow from others may be set, as JSON of a complete config
            does.

    Raises:
        ValueError: Unknown field, value of another type, or one that the dataclass itself refuses.
            The message starts with the field's dotted name.
    """
    class_: Any = type(config)
    types_by_name = _types_of(class_)
    changes = {}
    for name, value in values.items():
        field = section + name
        kind = types_by_name.get(name)
        if kind is None or (_is_derived(kind) and not derived):
            fail_unknown(field, [known for known in types_by_name if known[0] != "_"])
        default = getattr(config, name)
        if not dataclasses.is_dataclass(default):
            changes[name] = _typed(field, value, kind)
        elif isinstance(value, Mapping):
            changes[name] = overlay(default, value, f"{field}.", derived)
        else:
            fail(field, value, f"a section [{field}]")
    try:
        return dataclasses.replace(config, **changes)
    except ValueError as error:  # of the dataclass's own checks, which name the bare field
        raise ValueError(f"{section}{error}") from None


def plain(config: Any) -> dict[str, Any]:
    """The values of a config as JSON has them, which :func:`overlay` reads back.

    ``model_spec``, which holds functions and follows from ``[model]``, is left out.
    """
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    values.pop("model_spec", None)
    return {
        name: plain(value) if dataclasses.is_dataclass(value) else value
        for name, value in values.items()
    }


def fail_unknown(field: str, names: list[str]) -> NoReturn:
    """Refuse a field that does not exist, with the name that it resembles.

    Args:
        field: Dotted name.
        names: Names of the fields of its section.

    Raises:
        ValueError: Always.
    """
    section, _, name = field.rpartition(".")
    close = difflib.get_close_matches(name[:_LONGEST_NAME], names, 1)
    place = f"[{section}]" if section else "a config"
    hint = f"did you mean {close[0]!r}?" if close else f"those of {place}: {', '.join(names)}"
    raise ValueError(f"{field[:200]}: found a field that {place} does not have; {hint}")


@functools.cache
def _types_of(section: type) -> dict[str, Any]:
    hints = typing.get_type_hints(section, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(section) if field.init}


def _is_derived(kind: Any) -> bool:
    return typing.get_origin(kind) is Annotated and tyro.conf.Suppress in kind.__metadata__


def _typed(field: str, value: Any, kind: Any) -> Any:
    try:
        return _read(value, kind)
    except (TypeError, OverflowError):  # an integer beyond float64
        fail(field, value, _describe(kind))


def _read(value: Any, kind: Any) -> Any:
    """The value as a type has it; ``TypeError`` where it is of another one."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _read(value, arguments[0])
    if kind == OverrideImport and isinstance(value, str):
        (target,) = parse_cli_imports([value])  # it may have arguments: 'module.name={"lr": 1e-3}'
        return target
    if origin in (Union, types.UnionType):
        for argument in arguments:
            try:
                return _read(value, argument)
            except TypeError:
                continue
    elif origin is Literal:
        if value in arguments:
            return value
    elif origin in (list, tuple) and isinstance(value, (list, tuple)):
        is_fixed = origin is tuple and arguments[-1] is not ...
        if not is_fixed or len(value) == len(arguments):
            kinds = arguments if is_fixed else [arguments[0]] * len(value)
            return origin(_read(item, of) for item, of in zip(value, kinds, strict=True))
    elif origin is dict and isinstance(value, Mapping):
        return dict(value)
    elif kind is float and type(value) is int:
        return float(value)
    elif type(value) is kind:
        return value
    raise TypeError


def _describe(kind: Any) -> str:
    """Values that a type takes, in words of TOML."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _describe(arguments[0])
    if origin in (Union, types.UnionType):
        texts = [_describe(argument) for argument in arguments if argument is not types.NoneType]
        return " or ".join(dict.fromkeys(texts))
    if origin is Literal:
        return f"one of {', '.join(map(repr, arguments))}"
    if origin in (list, tuple):
        return f"a list, of {_describe(arguments[0])} each"
    words = {float: "a number", int: "an integer", bool: "true or false", str: "a text"}
    return words.get(kind, getattr(kind, "__name__", str(kind)))
