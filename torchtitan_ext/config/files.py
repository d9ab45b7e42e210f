"""TOML files, each of which may extend another and then says only what differs.

::

    extends = "base/h100.toml"  # beside this file

    [training]
    steps = 100
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torchtitan_ext.config.schedule_file import read_toml


def read(path: str | Path, field: str = "config") -> dict[str, Any]:
    """Read the values of a file, laid over those of the files that it extends.

    Args:
        path: File.
        field: Name of the file in errors.

    Raises:
        ValueError: A file cannot be read, is not TOML, or extends itself.
    """
    path, visited = Path(path), set()
    result: dict[str, Any] = {}
    while True:
        visited.add(os.path.realpath(path))
        values = read_toml(field, path)
        base, field = values.pop("extends", None), f"{path}: extends"
        result = _over(values, result)
        if base is None:
            return result
        if not isinstance(base, str):
            raise ValueError(f"{field}: found {base!r}, expected the path of a TOML file")
        path = path.parent / base
        if os.path.realpath(path) in visited:
            raise ValueError(f"{field}: found {base!r}, which extends this file in turn")


def _over(base: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in values.items():
        below = base.get(name)
        are_sections = isinstance(below, dict) and isinstance(value, dict)
        merged[name] = _over(below, value) if are_sections else value  # type: ignore[arg-type]
    return merged
