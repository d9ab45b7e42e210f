"""Config dataclasses from the plain values of TOML and JSON, and back."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import json
import re
import typing
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import pydantic

# Field of torchtitan that holds functions and follows from ``[model]``: in no file.
_MODEL_SPEC = "model_spec"


def overlay(config: Any, values: Mapping[str, Any], section: str = "") -> Any:
    """Lay plain values over a config.

    Args:
        config: Dataclass whose fields are the defaults; stays as it is.
        values: Values by field; those of a section are a mapping in turn.
        section: Prefix of field names in errors, such as ``optimizer.``.

    Raises:
        ValueError: Unknown fields, values of another type, or that a dataclass itself refuses. Each
            has a line, which starts with the field's dotted name.
    """
    problems: list[str] = []
    result = overlaid(config, values, problems, section)
    if problems:
        raise ValueError("\n".join(problems))
    return result


def overlaid(config: Any, values: Mapping[str, Any], problems: list[str], section: str = "") -> Any:
    """Lay plain values over a config, without those that are mistakes.

    Args:
        config: See :func:`overlay`, as ``values`` and ``section``.
        values: Values by field.
        problems: Gets a line for each mistake.
        section: Prefix of field names.
    """
    kinds = typing.get_type_hints(type(config), include_extras=True)
    fields = [field.name for field in dataclasses.fields(config) if field.init]
    names = [name for name in fields if name != _MODEL_SPEC]
    changes = {}
    for name, value in values.items():
        field = section + name
        try:
            if name not in names:
                fail_unknown(field, names)
            default = getattr(config, name)
            if not dataclasses.is_dataclass(default):
                changes[name] = _typed(field, value, kinds[name])
            elif isinstance(value, Mapping):
                changes[name] = overlaid(default, value, problems, f"{field}.")
            else:
                raise ValueError(f"{field}: found {value!r}, expected a section [{field}]")
        except ValueError as error:
            problems.append(str(error))
    try:
        return dataclasses.replace(config, **changes)
    except (ValueError, AssertionError):  # of the dataclass's own checks
        return _one_by_one(config, changes, problems, section)


def _one_by_one(config: Any, changes: dict[str, Any], problems: list[str], section: str) -> Any:
    """Change the fields that a dataclass accepts; each of the others is a line."""
    reasons: dict[str, str] = {}
    refused = []
    for name in [*changes, *changes]:  # some are accepted after others alone
        value = changes[name]
        try:
            config = dataclasses.replace(config, **{name: value})
            reasons.pop(name, None)
        except (ValueError, AssertionError) as error:
            reason = str(error)
            if dataclasses.is_dataclass(value):
                is_named = reason.startswith(f"{name}.")
                reason = reason.replace(" ", ": ", 1) if is_named else f"{name}: {reason}"
                refused.append(name)
            elif not re.match(r"\w+: found ", reason):
                reason = f"{name}: found {value!r}: {reason}"
            reasons[name] = reason
    problems += [section + reason for reason in reasons.values()]
    config = copy.copy(config) if refused else config
    for name in refused:  # further checks read their other fields
        setattr(config, name, changes[name])
    return config


def changed(config: Any, other: Any) -> dict[str, Any]:
    """Values of another config of the same classes that differ, as :func:`overlay` takes them."""
    names = [field.name for field in dataclasses.fields(config) if field.name != _MODEL_SPEC]
    pairs = ((name, getattr(config, name), getattr(other, name)) for name in names)
    return {
        name: changed(old, new) if dataclasses.is_dataclass(old) else new
        for name, old, new in pairs
        if old != new
    }


@contextlib.contextmanager
def unchecked(config: Any) -> Iterator[None]:
    """Let the classes of a config's sections accept every value while the context lasts.

    A program that makes a config from options would end at the first value that one refuses.
    """
    sections = [config]
    for section in sections:
        fields = (getattr(section, field.name) for field in dataclasses.fields(section))
        sections += [value for value in fields if dataclasses.is_dataclass(value)]
    classes = {type(section) for section in sections if hasattr(section, "__post_init__")}
    checks = {kind: kind.__post_init__ for kind in classes}
    try:
        for kind in checks:
            kind.__post_init__ = lambda _: None
        yield
    finally:
        for kind, check in checks.items():
            kind.__post_init__ = check


def plain(config: Any) -> dict[str, Any]:
    """The values of a config as JSON has them, which :func:`overlay` reads back."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    values.pop(_MODEL_SPEC, None)
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
    close = difflib.get_close_matches(field.rpartition(".")[2], names, 1)
    hint = f"did you mean {close[0]!r}?" if close else f"expected one of {', '.join(names)}"
    raise ValueError(f"{field}: found a field that does not exist; {hint}")


def _typed(field: str, value: Any, kind: Any) -> Any:
    """The value as its type has it: a list as a tuple, an integer as a number."""
    text = json.dumps(value, default=str)  # TOML's dates are of no field's type
    try:
        return pydantic.TypeAdapter(kind).validate_json(text, strict=True)
    except pydantic.ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Input should be ")
        raise ValueError(f"{field}: found {value!r}, expected {reason}") from None
