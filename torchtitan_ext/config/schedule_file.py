"""Schedules by operator type in a TOML file: static schedules, and tables made by hand.

::

    format = 1
    source = "where the numbers come from"

    [parameters]                # what generated them: any numbers and strings
    rule = "typical"

    [schedules.attn_q]          # one section for each operator type
    ell = 0.0012                # optional: the coefficients are those of compose(ell, steps)
    steps = 2                   # must be the number of rows below
    norm_scale = 1.01
    preconditioner = "frobenius"
    coefficients = [
        [8.28, -23.6, 17.3],
        [1.87, -1.26, 0.37],
    ]
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from amo_dist.config import fail, sort_operator_types
from amo_dist.schedule.polar_express import compose
from amo_dist.schedule.types import Schedule

# The import is by name: Python 3.10 has no tomllib, and only there the project depends on tomli.
_toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

_COMPOSED = 1e-6
"""Relative distance up to which coefficients count as those that ``ell`` composes."""


_FILE_KEYS, _SECTION_KEYS = (
    ({"format", "source", "schedules"}, {"parameters"}),
    ({"steps", "norm_scale", "preconditioner", "coefficients"}, {"ell"}),
)
"""Keys that must be there, and keys that may."""


def load_schedule_file(path: str | Path) -> dict[str, Schedule]:
    """Read and check a file.

    Args:
        path: A TOML file of the form above.

    Returns:
        The schedules by operator type, in their declared order.

    Raises:
        ValueError: The file cannot be read, is not TOML, has a key too many or too few or a value
            of another kind, or gives coefficients that are not those of its ``ell``.
    """
    record = read_toml("schedule_file", path)
    try:
        _check_keys("file", record, *_FILE_KEYS)
        if record["format"] is True or record["format"] != 1:
            fail("file.format", record["format"], "1")
        sections = record["schedules"]
        if not isinstance(sections, Mapping):
            fail("file.schedules", sections, "a section for each operator type")
        return {
            name: _read_schedule(f"file.schedules.{name}", sections[name])
            for name in sort_operator_types(sections)
        }
    except ValueError as error:
        raise ValueError(f"schedule_file {path}: {error}") from None


def _check_keys(field: str, record: object, needed: set[str], optional: set[str]) -> None:
    if not isinstance(record, Mapping) or not needed <= set(record) <= needed | optional:
        keys = sorted(record) if isinstance(record, Mapping) else record
        fail(field, keys, f"the keys {sorted(needed)}, and maybe {sorted(optional)}")


def _read_schedule(field: str, section: Any) -> Schedule:
    """The schedule of one operator type."""
    _check_keys(field, section, *_SECTION_KEYS)
    steps, ell = section["steps"], section.get("ell")
    try:
        rows = tuple(tuple(map(float, row)) for row in section["coefficients"])
    except (TypeError, ValueError):
        fail(f"{field}.coefficients", section["coefficients"], "rows of three numbers")
    try:
        schedule = Schedule(rows, float(section["norm_scale"]), section["preconditioner"])  # type: ignore[arg-type]
        composed = rows if ell is None else compose(ell, steps)
    except TypeError as error:
        raise ValueError(f"{field}: {error}") from None
    except ValueError as error:
        raise ValueError(f"{field}.{error}") from None
    if steps != len(rows):
        fail(f"{field}.steps", steps, f"{len(rows)}, the number of coefficients")
    pairs = zip(chain(*rows), chain(*composed), strict=True)
    if not all(math.isclose(*pair, rel_tol=_COMPOSED) for pair in pairs):
        # Edited by hand, most likely: either the bound or the coefficients no longer hold.
        fail(f"{field}.coefficients", rows, f"those of compose({ell}, {steps})")
    return schedule


def read_toml(field: str, path: str | Path) -> dict[str, Any]:
    """The content of a TOML file.

    Args:
        field: Name of the value in errors.
        path: The file.

    Raises:
        ValueError: It cannot be read, or is not TOML.
    """
    if Path(path).exists() and not Path(path).is_file():  # a pipe or a device may have no end
        raise ValueError(f"{field}: cannot read {path}: not a regular file")
    try:
        content: dict[str, Any] = _toml.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"{field}: cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # TOML's errors and those of UTF-8
        raise ValueError(f"{field}: {path} is not TOML: {error}") from None
    return content
