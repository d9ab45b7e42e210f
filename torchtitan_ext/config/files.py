"""TOML files, each of which may extend another and then says only what differs.

::

    extends = "base/h100.toml"  # beside this file

    [training]
    steps = 100
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from amo_dist.schedule.schedule_file import read_toml

EXTENDS = "extends"
"""The field that names the file below, relative to the file that says it."""

Chain: TypeAlias = list[tuple[Path, dict[str, Any]]]
"""A file and those that it extends, each with what it says itself."""


def chain(path: str | Path, field: str = "config") -> Chain:
    """A file and those that it extends, each with what it says itself.

    Args:
        path: Of the file.
        field: What errors call it.

    Returns:
        The file first, and last the one that extends none.

    Raises:
        ValueError: If one cannot be read or is not TOML, names no file, or extends itself.
    """
    found: Chain = []
    file: Path | None = Path(path)
    while file is not None:
        values = read_toml(field, file)
        base = values.pop(EXTENDS, None)
        found.append((file, values))
        field = f"{file}: {EXTENDS}"
        if base is None:
            return found
        if not isinstance(base, str):
            raise ValueError(f"{field}: found {base!r}, expected the path of a TOML file")
        file = file.parent / base
        if file.resolve() in {one.resolve() for one, _ in found}:
            raise ValueError(f"{field}: found {base!r}, which extends this file in turn")
    return found


def read(path: str | Path, field: str = "config") -> dict[str, Any]:
    """What a file says, laid over what the files say that it extends.

    Raises:
        ValueError: As :func:`chain`.
    """
    return merged(chain(path, field))


def merged(links: Chain) -> dict[str, Any]:
    """What the files of a :func:`chain` say together."""
    values: dict[str, Any] = {}
    for _, own in reversed(links):
        values = _over(values, own)
    return values


def origins(links: Chain) -> dict[str, Path]:
    """The fields that the files of a :func:`chain` set, by dotted name, and which file says so."""
    return {name: file for file, own in reversed(links) for name, _ in fields(own)}


def fields(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The fields of sections by dotted name.

    >>> dict(fields({"training": {"steps": 3}, "description": "a run"}))
    {'training.steps': 3, 'description': 'a run'}
    """
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from fields(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _over(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in own.items():
        below = merged.get(name)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        merged[name] = _over(below, value) if both else value  # type: ignore[arg-type]
    return merged
