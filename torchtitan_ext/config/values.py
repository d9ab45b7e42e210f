"""Config dataclasses from the plain values of TOML and JSON, and back."""

from __future__ import annotations

import dataclasses
import difflib
import json
import typing
from collections.abc import Mapping
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
        ValueError: Unknown field, value of another type, or one that the dataclass itself refuses.
            The message starts with the field's dotted name.
    """
    kinds = typing.get_type_hints(type(config), include_extras=True)
    fields = [field.name for field in dataclasses.fields(config) if field.init]
    names = [name for name in fields if name != _MODEL_SPEC]
    changes = {}
    for name, value in values.items():
        field = section + name
        if name not in names:
            fail_unknown(field, names)
        default = getattr(config, name)
        if not dataclasses.is_dataclass(default):
            changes[name] = _typed(field, value, kinds[name])
        elif isinstance(value, Mapping):
            changes[name] = overlay(default, value, f"{field}.")
        else:
            raise ValueError(f"{field}: found {value!r}, expected a section [{field}]")
    try:
        return dataclasses.replace(config, **changes)
    except ValueError as error:  # of the dataclass's own checks, which name the bare field
        raise ValueError(f"{section}{error}") from None


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
