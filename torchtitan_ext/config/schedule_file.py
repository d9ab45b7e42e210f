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
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import pydantic

from amo_dist.config import sort_operator_types
from amo_dist.schedule.polar_express import compose
from amo_dist.schedule.types import Schedule
from torchtitan_ext.runs import files

# The import is by name: Python 3.10 has no tomllib, and only there the project depends on tomli.
_toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

# Relative distance up to which coefficients count as those that ``ell`` composes.
_COMPOSED = 1e-6


class _Section(pydantic.BaseModel, extra="forbid"):
    """``[schedules.TYPE]``."""

    steps: int
    norm_scale: float
    preconditioner: str
    coefficients: tuple[tuple[float, float, float], ...]
    ell: float | None = None

    def schedule(self) -> Schedule:
        """The schedule.

        Raises:
            ValueError: The fields contradict each other.
        """
        rows = self.coefficients
        if self.steps != len(rows):
            raise ValueError(f"steps: found {self.steps}, expected {len(rows)}, as coefficients")
        composed = rows if self.ell is None else compose(self.ell, self.steps)
        pairs = zip(chain(*rows), chain(*composed), strict=True)
        if not all(math.isclose(*pair, rel_tol=_COMPOSED) for pair in pairs):
            # Edited by hand, most likely: either the bound or the coefficients no longer hold.
            raise ValueError(f"coefficients: found {rows}, expected those of ell = {self.ell}")
        return Schedule(rows, self.norm_scale, self.preconditioner)


class _File(pydantic.BaseModel, extra="forbid"):
    """A whole file."""

    format: Literal[1]
    source: str
    schedules: dict[str, _Section]
    parameters: dict[str, str | float] = {}


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
    try:
        sections = _File.model_validate(read_toml("schedule_file", path)).schedules
        return {name: sections[name].schedule() for name in sort_operator_types(sections)}
    except ValueError as error:
        raise ValueError(f"schedule_file {path}: {error}") from None


def read_toml(field: str, path: str | Path) -> dict[str, Any]:
    """The content of a TOML file.

    Args:
        field: Name of the value in errors.
        path: The file.

    Raises:
        ValueError: It cannot be read, or is not TOML.
    """
    try:
        content: dict[str, Any] = _toml.loads(files.read_bytes(path).decode())
    except OSError as error:
        raise ValueError(f"{field}: cannot read {path}: {files.reason(error)}") from None
    except (ValueError, RecursionError) as error:  # of TOML, of UTF-8, and of deep nesting
        raise ValueError(f"{field}: {path} is not TOML: {files.reason(error)}") from None
    return content
