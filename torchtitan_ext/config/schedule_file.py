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

import dataclasses
import importlib
import math
import sys
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from amo_dist.schedule import fields
from amo_dist.schedule.polar_express import compose
from amo_dist.schedule.types import Schedule

# The import is by name: Python 3.10 has no tomllib, and only there the project depends on tomli.
_toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

_COMPOSED = 1e-6
"""Relative distance up to which coefficients count as those that ``ell`` composes."""


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
        file = _File.from_dict(record, "file")
    except ValueError as error:
        raise ValueError(f"schedule_file {path}: {error}") from None
    return {name: section.schedule() for name, section in file.schedules.items()}


def read_toml(field: str, path: str | Path) -> dict[str, Any]:
    """The content of a TOML file.

    Args:
        field: Name of the value in errors.
        path: The file.

    Raises:
        ValueError: It cannot be read, or is not TOML.
    """
    try:
        content: dict[str, Any] = _toml.loads(fields.read_file(path).decode())
    except OSError as error:
        raise ValueError(f"{field}: cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # TOML's errors and those of UTF-8
        raise ValueError(f"{field}: {path} is not TOML: {error}") from None
    return content


def _read_number(field: str, entry: object) -> float:
    if isinstance(entry, bool) or not isinstance(entry, (int, float)):
        fields.fail(field, entry, "a finite number")
    return float(entry)


def _read_parameter(field: str, entry: object) -> object:
    if isinstance(entry, bool) or not isinstance(entry, (str, int, float)):
        fields.fail(field, entry, "a number or a string")
    return entry


_Number: TypeAlias = Annotated[float, _read_number]


@dataclasses.dataclass(frozen=True, slots=True)
class _Section(fields.Stored):
    """``[schedules.TYPE]``."""

    _is_handwritten = True

    steps: fields.Count
    norm_scale: _Number
    preconditioner: fields.Name
    coefficients: tuple[tuple[_Number, _Number, _Number], ...]
    ell: _Number | None = None

    def _check(self, field: str) -> None:
        if self.steps != len(self.coefficients):
            expected = f"{len(self.coefficients)}, the number of coefficients"
            fields.fail(f"{field}.steps", self.steps, expected)
        try:
            expected_rows = self.schedule().coefficients
            if self.ell is not None:
                expected_rows = compose(self.ell, self.steps)
        except ValueError as error:
            raise ValueError(f"{field}.{error}") from None
        pairs = zip(chain(*self.coefficients), chain(*expected_rows), strict=True)
        if not all(math.isclose(*pair, rel_tol=_COMPOSED) for pair in pairs):
            # Edited by hand, most likely: either the bound or the coefficients no longer hold.
            expected = f"those of compose({self.ell}, {self.steps})"
            fields.fail(f"{field}.coefficients", self.coefficients, expected)

    def schedule(self) -> Schedule:
        return Schedule(self.coefficients, self.norm_scale, self.preconditioner)


@dataclasses.dataclass(frozen=True, slots=True)
class _File(fields.Stored):
    """A whole file."""

    _is_handwritten = True

    format: Annotated[int, fields.choice(1)]
    source: fields.Name
    schedules: Mapping[str, _Section]
    parameters: Mapping[str, Annotated[str | int | float, _read_parameter]] = dataclasses.field(
        default_factory=dict
    )
