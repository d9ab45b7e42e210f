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
import importlib
import json
import math
import re
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from amo_dist.config import PRECONDITIONERS, Triple, sort_operator_types
from amo_dist.schedule import fields
from amo_dist.schedule.polar_express import compose
from amo_dist.schedule.types import Schedule

# By name: tomli is tomllib on Python 3.10, and the project depends on it there alone.
_toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

_FORMAT = 1
_KEYS = ("steps", "norm_scale", "preconditioner", "coefficients")
_COMPOSED = 1e-6
"""Relative distance up to which coefficients count as those that ``ell`` composes."""


def _nothing() -> Mapping[str, Any]:
    return types.MappingProxyType({})


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduleTable:
    """Schedules by operator type, and what they come from."""

    schedules: Mapping[str, Schedule]
    """At least one."""
    source: str
    """Where the numbers come from, for a human reader."""
    parameters: Mapping[str, str | int | float] = dataclasses.field(default_factory=_nothing)
    """What generated the table."""
    ell: Mapping[str, float] = dataclasses.field(default_factory=_nothing)
    """Lower bound for which a type's coefficients were composed; only the composed types."""

    def to_toml(self) -> str:
        """The text of a file from which :func:`read_schedule_file` gives an equal table."""
        parts = [f"format = {_FORMAT}", f"source = {_toml_value(self.source)}"]
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
        return _table(record)
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


def _table(record: dict[str, Any]) -> ScheduleTable:
    record = {"parameters": {}, **record}
    fields.read_record("file", record, ["format", "source", "parameters", "schedules"])
    if type(record["format"]) is not int or record["format"] != _FORMAT:
        fields.fail("format", record["format"], f"{_FORMAT}")
    source = record["source"]
    if not isinstance(source, str) or not source:
        fields.fail("source", source, "a string that says where the numbers come from")
    sections = record["schedules"]
    if not isinstance(sections, Mapping) or not sections:
        fields.fail("schedules", sections, "a section [schedules.TYPE] for each operator type")
    names = sort_operator_types(sections)
    schedules = {name: _schedule(f"schedules.{name}", sections[name]) for name in names}
    ell = {
        name: _ell(name, sections[name], schedules[name])
        for name in names
        if "ell" in sections[name]
    }
    return ScheduleTable(schedules, source, _parameters(record["parameters"]), ell)


def _parameters(found: object) -> Mapping[str, str | int | float]:
    if not isinstance(found, Mapping):
        fields.fail("parameters", found, "a section of numbers and strings")
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            fields.fail(f"parameters.{name}", value, "a number or a string")
    return found


def _schedule(field: str, found: object) -> Schedule:
    keys = [*_KEYS, "ell"] if isinstance(found, Mapping) and "ell" in found else _KEYS
    record = fields.read_record(field, found, keys)
    rows = fields.read_list(f"{field}.coefficients", record["coefficients"])
    coefficients = tuple(_triple(f"{field}.coefficients[{i}]", row) for i, row in enumerate(rows))
    steps = fields.read_int(f"{field}.steps", record["steps"], 1)
    if steps != len(coefficients):
        fields.fail(f"{field}.steps", steps, f"{len(coefficients)}, the number of coefficients")
    norm_scale = _number(f"{field}.norm_scale", record["norm_scale"])
    preconditioner = fields.read_choice(
        f"{field}.preconditioner", record["preconditioner"], PRECONDITIONERS
    )
    try:
        return Schedule(coefficients, norm_scale=norm_scale, preconditioner=preconditioner)
    except ValueError as error:
        raise ValueError(f"{field}.{error}") from None


def _triple(field: str, row: object) -> Triple:
    values = fields.read_list(field, row)
    if len(values) != 3:
        fields.fail(field, values, "three numbers [a, b, c]")
    a, b, c = (_number(field, value) for value in values)
    return a, b, c


def _number(field: str, found: object) -> float:
    is_number = isinstance(found, (int, float)) and not isinstance(found, bool)
    if not is_number or not math.isfinite(found):  # type: ignore[arg-type]
        fields.fail(field, found, "a finite number")
    return float(found)  # type: ignore[arg-type]


def _ell(name: str, section: Mapping[str, Any], schedule: Schedule) -> float:
    field = f"schedules.{name}"
    ell = _number(f"{field}.ell", section["ell"])
    if not 0.0 < ell <= 1.0:
        fields.fail(f"{field}.ell", ell, "a number in (0, 1]")
    expected = compose(ell, schedule.num_steps)
    pairs = zip(schedule.coefficients, expected, strict=True)
    if not all(
        math.isclose(found, value, rel_tol=_COMPOSED)
        for triple, composed in pairs
        for found, value in zip(triple, composed, strict=True)
    ):
        # Edited by hand, most likely: either the bound or the coefficients no longer hold.
        fields.fail(
            f"{field}.coefficients",
            schedule.coefficients,
            f"those of compose({ell}, {len(expected)})",
        )
    return ell


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml_value(name)


def _toml_value(value: str | int | float) -> str:
    """A TOML value; JSON's strings are TOML's too, once DEL is escaped."""
    if isinstance(value, str):
        return json.dumps(value).replace("\x7f", "\\u007f")
    return repr(value)
