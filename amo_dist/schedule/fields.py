"""Strict reading of JSON state: each departure is one ``ValueError`` that names the field.

How a dataclass that derives from ``Stored`` is read and written follows from its annotations. A
missing field and an unknown one are errors; in a file that users write by hand, a field with a
default may be missing.
"""

from __future__ import annotations

import base64
import dataclasses
import errno
import functools
import json
import math
import os
import reprlib
import stat
import struct
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import (
    Annotated,
    Any,
    NoReturn,
    TypeAlias,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from amo_dist.config import sort_operator_types

_Stored = TypeVar("_Stored", bound="Stored")

# Bounded in length and depth: the state of a damaged file may be long, or nested past recursion.
_show = reprlib.Repr()
_show.maxlevel, _show.maxstring, _show.maxother = 3, 120, 120
_show.maxdict = _show.maxlist = _show.maxtuple = 16


def show(value: object) -> str:
    """A value as text of bounded length, for messages."""
    return _show.repr(value)


def fail(field: str, value: object, expected: str) -> NoReturn:
    """Raise the ``ValueError`` for one field: what was found and what was expected."""
    # A name from a damaged state may hold line ends: errors stay on one line.
    place = field if field.isprintable() else show(field)
    raise ValueError(f"{place}: found {show(value)}, expected {expected}")


def read_file(path: str | Path, most: int = 2**26, offset: int = 0) -> bytes:
    """Text of a user's file.

    Args:
        path: The file.
        most: Bytes that it may hold: a file that has no end is refused before memory has.
        offset: First byte to read.

    Raises:
        OSError: It cannot be read, holds more, or is no regular file: a pipe may wait for good.
    """

    def open_at_once(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)

    with open(path, "rb", opener=open_at_once) as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
        stream.seek(offset)
        data = stream.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"more than {most} bytes", os.fspath(path))
    return data


def read_json(field: str, text: object) -> Any:
    """Parse JSON text, refusing whatever is not JSON text."""
    if not isinstance(text, str):
        fail(field, text, "JSON text")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        fail(field, text, "JSON text")


def read_record(
    field: str, entry: object, required: Collection[str], optional: Collection[str] = ()
) -> Mapping[str, Any]:
    """A mapping with all of the required keys, and none but those and the optional ones."""
    keys = sorted({*required, *optional})
    if not isinstance(entry, Mapping):
        fail(field, entry, f"a mapping with the keys {', '.join(keys)}")
    for key in required:
        if key not in entry:
            fail(f"{field}.{key}", "nothing", "this key")
    for key in entry:
        if key not in keys:
            fail(f"{field}.{key}", "this key", f"only the keys {', '.join(keys)}")
    return entry


def read_list(field: str, entry: object, length: int | None = None) -> list[Any]:
    """A list or tuple, of a given length where there is one."""
    if not isinstance(entry, (list, tuple)) or length not in (None, len(entry)):
        fail(field, entry, "a list" if length is None else f"a list of {length}")
    return list(entry)


def read_int(field: str, entry: object, minimum: int, maximum: int | None = None) -> int:
    """An integer, never a boolean, in a range."""
    if type(entry) is not int or entry < minimum or (maximum is not None and entry > maximum):
        most = "" if maximum is None else f" and <= {maximum}"
        fail(field, entry, f"an integer >= {minimum}{most}")
    return entry


def read_choice(field: str, entry: object, *choices: object) -> Any:
    """One of a few values, of its type: 1 is neither 1.0 nor true."""
    if not any(type(entry) is type(choice) and entry == choice for choice in choices):
        one_of = "one of " if len(choices) > 1 else ""
        fail(field, entry, one_of + ", ".join(map(repr, choices)))
    return entry


def read_float(field: str, entry: object) -> float:
    """A finite float, written by ``float.hex``: the same bits on any machine."""
    try:
        value = float.fromhex(entry) if isinstance(entry, str) else math.nan
    except (ValueError, OverflowError):
        value = math.nan
    # Only the canonical form: "1" or " 0x1p+0 " would round-trip to other text.
    if not math.isfinite(value) or value.hex() != entry:
        fail(field, entry, "a finite float in the form of float.hex()")
    return value


def read_ell(field: str, entry: object) -> float:
    """A float in (0, 1], written by ``float.hex``."""
    value = read_float(field, entry)
    if not 0.0 < value <= 1.0:
        fail(field, entry, "a float in (0, 1]")
    return value


class Packed(tuple[float, ...]):
    """Many floats, written as one text: base64 of their bits, little-endian."""

    __slots__ = ()

    def to_text(self) -> str:
        """Form that `read_packed` reads."""
        return base64.b64encode(struct.pack(f"<{len(self)}d", *self)).decode()


def read_packed(field: str, entry: object) -> Packed:
    """Finite floats from the text of `Packed`."""
    try:
        data = base64.b64decode(entry, validate=True) if isinstance(entry, str) else b""
        values = Packed(struct.unpack(f"<{len(data) // 8}d", data))
    except (ValueError, struct.error):
        values = Packed()
    if not all(map(math.isfinite, values)) or values.to_text() != entry:
        fail(field, entry, "base64 of finite float64 values")
    return values


def read_name(field: str, entry: object) -> str:
    """A string that is not empty."""
    if not isinstance(entry, str) or not entry:
        fail(field, entry, "a non-empty string")
    return entry


Reader: TypeAlias = Callable[[str, Any], Any]
"""Takes the name of a field and its JSON value, and gives the value or raises ``ValueError``."""


def choice(*choices: object) -> Reader:
    """Reads one of a few values."""
    return lambda field, entry: read_choice(field, entry, *choices)


Name: TypeAlias = Annotated[str, read_name]
Count: TypeAlias = Annotated[int, functools.partial(read_int, minimum=1)]
CountOrZero: TypeAlias = Annotated[int, functools.partial(read_int, minimum=0)]
Steps: TypeAlias = Annotated[int, functools.partial(read_int, minimum=1, maximum=10_000)]
"""Newton-Schulz steps: no run takes more, and no damaged state may try to."""
Float: TypeAlias = Annotated[float, read_float]
Ell: TypeAlias = Annotated[float, read_ell]
Floats: TypeAlias = Annotated[Packed, read_packed]


class Stored:
    """A dataclass that is written to JSON values and read back bit for bit.

    Its annotations say how: types annotated with a reader, as above, other ``Stored``, and tuples,
    mappings from groups, and ``None`` of these.
    """

    __slots__ = ()
    _is_handwritten = False
    """Whether fields with defaults may be missing."""

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values, floats as ``float.hex()``."""
        names = [part.name for part in dataclasses.fields(self)]  # type: ignore[arg-type]
        return {name: _write(getattr(self, name)) for name in names}

    @classmethod
    def from_dict(cls: type[_Stored], entry: object, field: str) -> _Stored:
        """Read and check what ``to_dict`` wrote; ``field`` names it in errors.

        Raises:
            ValueError: A field is missing, unknown, malformed or at odds with another; the message
                names it.
        """
        hints, missing = get_type_hints(cls, include_extras=True), dataclasses.MISSING
        required = [
            part.name
            for part in dataclasses.fields(cls)  # type: ignore[arg-type]
            if not cls._is_handwritten
            or (part.default is missing and part.default_factory is missing)
        ]
        record = read_record(field, entry, required, hints)
        made = cls(**{key: _read(hints[key], f"{field}.{key}", record[key]) for key in record})
        made._check(field)
        return made

    def _check(self, field: str) -> None:
        """Refuse fields that contradict one another."""


def _read(hint: Any, field: str, entry: Any) -> Any:
    """The value of an annotation."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return args[1](field, entry)
    if type(None) in args:
        return None if entry is None else _read(args[0], field, entry)
    if origin is tuple:
        is_open = args[-1] is Ellipsis
        values = read_list(field, entry, None if is_open else len(args))
        hints = args[:1] * len(values) if is_open else args
        pairs = enumerate(zip(hints, values, strict=True))
        return tuple(_read(inner, f"{field}[{i}]", value) for i, (inner, value) in pairs)
    if origin is Mapping:
        if not isinstance(entry, Mapping):
            fail(field, entry, "a mapping by operator type")
        for name in entry:
            read_name(field, name)
        names = sort_operator_types(entry)
        return {name: _read(args[1], f"{field}.{name}", entry[name]) for name in names}
    return hint.from_dict(entry, field)


def _write(value: Any) -> Any:
    if isinstance(value, Stored):
        return value.to_dict()
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, Packed):
        return value.to_text()
    if isinstance(value, tuple):
        return [_write(part) for part in value]
    if isinstance(value, Mapping):
        return {name: _write(part) for name, part in value.items()}
    return value
