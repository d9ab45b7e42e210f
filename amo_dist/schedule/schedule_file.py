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

Floats are written so that they read back to the last bit.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import json
import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from amo_dist.config import PRECONDITIONERS, Triple, sort_operator_types
from amo_dist.schedule import fields
from amo_dist.schedule.polar_express import compose
from amo_dist.schedule.types import Schedule

# By name: tomli is tomllib on Python 3.10, and the project depends on it there alone.
_toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

_COMPOSED = 1e-6
"""Relative distance up to which coefficients count as those that ``ell`` composes."""


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduleTable:
    """Schedules by operator type, and what they come from."""

    schedules: Mapping[str, Schedule]
    """At least one."""
    source: str
    """Where the numbers come from, for a human reader."""
    parameters: Mapping[str, str | int | float] = dataclasses.field(default_factory=dict)
    """What generated the table."""
    ell: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Lower bound for which a type's coefficients were composed; only the composed types."""

    def to_toml(self) -> str:
        """The text of a file from which :func:`read_schedule_file` gives an equal table."""
        parts = ["format = 1", f"source = {_toml_value(self.source)}"]
        if self.parameters:
            parts += ["", "[parameters]"]
            parts += [f"{_key(name)} = {_toml_value(v)}" for name, v in self.parameters.items()]
        for name in sort_operator_types(self.schedules):
            parts += ["", f"[schedules.{_key(name)}]", *self._section(name)]
        return "\n".join(parts) + "\n"

    def _section(self, name: str) -> list[str]:
        schedule = self.schedules[name]
        ell = [f"ell = {_toml_value(self.ell[name])}"] if name in self.ell else []
        rows = [f"    {list(triple)!r}," for triple in schedule.coefficients]
        return [
            *ell,
            f"steps = {schedule.num_steps}",
            f"norm_scale = {schedule.norm_scale!r}",
            f"preconditioner = {_toml_value(schedule.preconditioner)}",
            "coefficients = [",
            *rows,
            "]",
        ]


def load_schedule_file(path: str | Path) -> dict[str, Schedule]:
    """The schedules of a file by operator type.

    Raises:
        ValueError: As :func:`read_schedule_file`.
    """
    return dict(read_schedule_file(path).schedules)


def read_schedule_file(path: str | Path) -> ScheduleTable:
    """Read and check a file.

    Args:
        path: A TOML file of the form above.

    Returns:
        The table, its operator types in their declared order.

    Raises:
        ValueError: The file cannot be read, is not TOML, has a key too many or too few or a value
            of another kind, or gives coefficients that are not those of its ``ell``.
    """
    record = read_toml("schedule_file", path)
    try:
        return _File.from_dict(record, "file").table()
    except ValueError as error:
        raise ValueError(f"schedule_file {path}: {error}") from None


def read_toml(field: str, path: str | Path) -> dict[str, Any]:
    """The content of a TOML file.

    Args:
        field: What errors call it.
        path: The file.

    Raises:
        ValueError: It cannot be read, or is not TOML.
    """
    try:
        content: dict[str, Any] = _toml.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{field}: cannot read {path}: {error.strerror}") from None
    except ValueError as error:  # TOML's errors and those of UTF-8
        raise ValueError(f"{field}: {path} is not TOML: {error}") from None
    return content


def _read_number(field: str, found: object) -> float:
    is_number = isinstance(found, (int, float)) and not isinstance(found, bool)
    if not is_number or not math.isfinite(found):  # type: ignore[arg-type]
        fields.fail(field, found, "a finite number")
    return float(found)  # type: ignore[arg-type]


def _read_triple(field: str, found: object) -> Triple:
    values = fields.read_list(field, found)
    if len(values) != 3:
        fields.fail(field, values, "three numbers [a, b, c]")
    a, b, c = (_read_number(field, value) for value in values)
    return a, b, c


def _read_parameter(field: str, found: object) -> object:
    if isinstance(found, bool) or not isinstance(found, (str, int, float)):
        fields.fail(field, found, "a number or a string")
    return found


_Number: TypeAlias = Annotated[float, _read_number]


@dataclasses.dataclass(frozen=True, slots=True)
class _Section(fields.Stored):
    """``[schedules.TYPE]``."""

    steps: fields.Count
    norm_scale: _Number
    preconditioner: Annotated[str, fields.choice(*PRECONDITIONERS)]
    coefficients: tuple[Annotated[Triple, _read_triple], ...]
    ell: _Number | None = None

    def _check(self, field: str) -> None:
        if self.steps != len(self.coefficients):
            expected = f"{len(self.coefficients)}, the number of coefficients"
            fields.fail(f"{field}.steps", self.steps, expected)
        try:
            self.schedule()
        except ValueError as error:
            raise ValueError(f"{field}.{error}") from None
        if self.ell is None:
            return
        if not 0.0 < self.ell <= 1.0:
            fields.fail(f"{field}.ell", self.ell, "a number in (0, 1]")
        found = itertools.chain(*self.coefficients)
        composed = itertools.chain(*compose(self.ell, self.steps))
        close = functools.partial(math.isclose, rel_tol=_COMPOSED)
        if not all(map(close, found, composed)):
            # Edited by hand, most likely: either the bound or the coefficients no longer hold.
            expected = f"those of compose({self.ell}, {self.steps})"
            fields.fail(f"{field}.coefficients", self.coefficients, expected)

    def schedule(self) -> Schedule:
        return Schedule(self.coefficients, self.norm_scale, self.preconditioner)


@dataclasses.dataclass(frozen=True, slots=True)
class _File(fields.Stored):
    """A whole file."""

    format: Annotated[int, fields.choice(1)]
    source: fields.Name
    schedules: Mapping[str, _Section]
    parameters: Mapping[str, Annotated[str | int | float, _read_parameter]] = dataclasses.field(
        default_factory=dict
    )

    def _check(self, field: str) -> None:
        if not self.schedules:
            fields.fail("schedules", {}, "a section [schedules.TYPE] for each operator type")

    def table(self) -> ScheduleTable:
        schedules = {name: section.schedule() for name, section in self.schedules.items()}
        ell = {n: section.ell for n, section in self.schedules.items() if section.ell is not None}
        return ScheduleTable(schedules, self.source, self.parameters, ell)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml_value(name)


def _toml_value(value: str | int | float) -> str:
    """A TOML value; JSON's strings are TOML's too, once DEL is escaped."""
    if isinstance(value, str):
        return json.dumps(value).replace("\x7f", "\\u007f")
    return repr(value)
