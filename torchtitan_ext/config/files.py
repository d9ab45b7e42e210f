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

from amo_dist.schedule.fields import read_file, show
from torchtitan_ext.config.schedule_file import read_toml

EXTENDS = "extends"
"""Field that names the next file, relative to the file that holds it."""

Chain: TypeAlias = list[tuple[Path, dict[str, Any]]]
"""Files from the one asked for to the last one it extends, each with its own values."""

_MOST_BYTES = 2**20
_MOST_LINKS = 16
_MOST_SECTIONS = 8
_MOST_DOTS = 256
"""Dots in a line: the time and memory of TOML's readers are quadratic in the parts of a key."""


def chain(path: str | Path, field: str = "config") -> Chain:
    """Read a file and those that it extends.

    Args:
        path: File.
        field: Name of the file in errors.

    Returns:
        The file first, and last the one that extends none.

    Raises:
        ValueError: A file cannot be read, is not TOML, is far larger than a config, or extends
            itself.
    """
    links: Chain = []
    read: set[Path] = set()
    file = Path(path)
    while True:
        values = _read(field, file)
        base = values.pop(EXTENDS, None)
        links.append((file, values))
        read.add(file.resolve())
        if base is None:
            return links
        field = f"{file}: {EXTENDS}"
        if not isinstance(base, str) or "\0" in base:
            raise ValueError(f"{field}: found {show(base)}, expected the path of a TOML file")
        file = file.parent / base
        if file.resolve() in read:
            raise ValueError(f"{field}: found {show(base)}, which extends this file in turn")
        if len(links) == _MOST_LINKS:
            raise ValueError(
                f"{field}: found {show(base)}, file {_MOST_LINKS + 1} of a chain, expected at "
                f"most {_MOST_LINKS} files"
            )


def _read(field: str, file: Path) -> dict[str, Any]:
    try:
        text = read_file(file, _MOST_BYTES)
    except OSError as error:
        raise ValueError(f"{field}: cannot read {file}: {error.strerror}") from None
    dots = max((line.count(b".") for line in text.splitlines()), default=0)
    if dots > _MOST_DOTS:
        raise ValueError(
            f"{field}: found a line with {dots} dots in {file}, expected at most {_MOST_DOTS}: "
            "write a list over several lines"
        )
    values = read_toml(field, file)
    level: list[Any] = [values]
    for _ in range(_MOST_SECTIONS):
        level = [value for section in level for value in section.values()]
        level = [value for value in level if isinstance(value, dict)]
    if level:
        raise ValueError(
            f"{field}: found more than {_MOST_SECTIONS} nested sections in {file}, expected fewer"
        )
    return values


def read(path: str | Path, field: str = "config") -> dict[str, Any]:
    """Read the values of a file, laid over those of the files that it extends.

    Raises:
        ValueError: A mistake in one of the files, see :func:`chain`.
    """
    return merged(chain(path, field))


def merged(links: Chain) -> dict[str, Any]:
    """Merge the values of a :func:`chain`."""
    values: dict[str, Any] = {}
    for _, own in reversed(links):
        values = _over(values, own)
    return values


def origin(links: Chain, name: str) -> Path:
    """The file of a :func:`chain` that sets a field or a part of it; the first one if none does.

    Args:
        links: Files.
        name: Dotted name of the field.
    """
    for file, own in links:
        if any(f"{field}.".startswith(f"{name}.") for field, _ in fields(own)):
            return file
    return links[0][0]


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
        are_sections = isinstance(below, Mapping) and isinstance(value, Mapping)
        merged[name] = _over(below, value) if are_sections else value  # type: ignore[arg-type]
    return merged
