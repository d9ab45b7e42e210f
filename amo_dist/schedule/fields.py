"""Strict reading of JSON state: each departure is one ``ValueError`` that names the field."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

# Bounded in length and depth: the state of a damaged file may be long, or nested past recursion.
_show = reprlib.Repr()
_show.maxlevel, _show.maxstring, _show.maxother = 3, 120, 120
_show.maxdict = _show.maxlist = _show.maxtuple = 16


def fail(field: str, found: object, expected: str) -> NoReturn:
    """Raise the ``ValueError`` for one field: what was found and what was expected."""
    # A name from a damaged state may hold line ends: errors stay on one line.
    place = field if field.isprintable() else _show.repr(field)
    raise ValueError(f"{place}: found {_show.repr(found)}, expected {expected}")


def read_json(field: str, text: object) -> Any:
    """Parse JSON text, refusing whatever is not JSON text."""
    if not isinstance(text, str):
        fail(field, text, "JSON text")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        fail(field, text, "JSON text")


def read_record(field: str, found: object, keys: Collection[str]) -> Mapping[str, Any]:
    """A mapping with exactly these keys, neither fewer nor more."""
    if not isinstance(found, Mapping):
        fail(field, found, f"a mapping with the keys {', '.join(sorted(keys))}")
    for key in keys:
        if key not in found:
            fail(f"{field}.{key}", "nothing", "this key")
    for key in found:
        if key not in keys:
            fail(f"{field}.{key}", "this key", f"only the keys {', '.join(sorted(keys))}")
    return found


def read_list(field: str, found: object) -> list[Any]:
    """A list or tuple."""
    if not isinstance(found, (list, tuple)):
        fail(field, found, "a list")
    return list(found)


def read_int(field: str, found: object, minimum: int) -> int:
    """An integer, never a boolean, of at least ``minimum``."""
    if type(found) is not int or found < minimum:
        fail(field, found, f"an integer >= {minimum}")
    return found


def read_choice(field: str, found: object, choices: Collection[str]) -> str:
    """One of a few strings."""
    if not isinstance(found, str) or found not in choices:
        fail(field, found, f"one of {', '.join(map(repr, choices))}")
    return found


def write_float(value: float) -> str:
    """A float as text that ``read_float`` turns back into the same bits on any machine."""
    return value.hex()


def read_float(field: str, found: object) -> float:
    """A finite float, written by ``write_float``."""
    expected = "a finite float in the form of float.hex()"
    if not isinstance(found, str):
        fail(field, found, expected)
    try:
        value = float.fromhex(found)
    except (ValueError, OverflowError):
        fail(field, found, expected)
    # Only the canonical form: "1" or " 0x1p+0 " would round-trip to other text.
    if not math.isfinite(value) or value.hex() != found:
        fail(field, found, expected)
    return value


def read_error(field: str, found: object) -> float:
    """A projected error, in [-1, 1]: rounding takes the least ones just below zero."""
    value = read_float(field, found)
    if not abs(value) <= 1.0:
        fail(field, found, "a float in [-1, 1]")
    return value


def read_ell(field: str, found: object) -> float:
    """A float in (0, 1], written by ``write_float``."""
    value = read_float(field, found)
    if not 0.0 < value <= 1.0:
        fail(field, found, "a float in (0, 1]")
    return value


def read_names(field: str, found: object) -> tuple[str, ...]:
    """A non-empty list of distinct, non-empty strings."""
    names = read_list(field, found)
    if not names or not all(isinstance(name, str) and name for name in names):
        fail(field, found, "a non-empty list of non-empty strings")
    if len(set(names)) != len(names):
        fail(field, found, "distinct names")
    return tuple(names)
