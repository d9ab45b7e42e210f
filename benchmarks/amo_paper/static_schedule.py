"""``static-schedule``: fixed schedules by operator type, from measured geometry.

A geometry log is a file of JSON lines, one object for each matrix and measured step::

    {"step": 10, "name": "layers.0.attention.wq.weight", "layer": 0, "operator_type": "attn_q",
     "family": "Qwen3", "sigma_min": 1.2e-4, "sigma_max": 3.1, "frobenius": 7.9, ...}

``sigma_min`` and ``sigma_max`` are the extreme singular values of the fp32 momentum that goes into
Newton-Schulz, and ``frobenius`` is its Frobenius norm, all in the units of the momentum. These
three, ``operator_type`` and ``family`` are read here; further keys belong to other readers.
``null`` stands for a value that is not finite.

The rules are the AMO paper's for its static baselines: per operator type a percentile of
``ell = max(sigma_min, tau * sigma_max) / frobenius`` over all matrices and steps of the pool, and
the fewest steps, 1 to 8, that bring it within the tolerance of one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from amo_dist.config import sort_operator_types
from amo_dist.schedule.polar_express import SAFETY, compose, simulate
from torchtitan_ext.runs import files
from torchtitan_ext.runs.records import read_records

NUMBER = (int, float, type(None))
"""Types of a number in a record; ``None`` is one that was not finite."""

RULES: Mapping[str, int] = {"typical": 50, "conservative": 25, "floor": 10}
"""Percentile of ``ell`` by the name of the rule."""

TAU = 1e-10
"""Singular values below this fraction of the largest count as that fraction of it."""

MAX_STEPS = 8
"""The most Newton-Schulz steps a static schedule gets."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pool:
    """The values of ``ell`` that a schedule is made from.

    Attributes:
        ell_by_type: All of an operator type, each in (0, 1].
        families: Families of the models that contribute, sorted.
        num_invalid: Records left out: a value is not finite, or the matrix is all zero.
    """

    ell_by_type: Mapping[str, Sequence[float]]
    families: tuple[str, ...]
    num_invalid: int


def read_geometry(path: Path, kinds: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Read a geometry log.

    Args:
        path: File of JSON lines, as described above.
        kinds: Types of the fields that are read.

    Raises:
        ValueError: The file cannot be read, or a field is missing or of another type.
    """
    if not (records := read_records(path)):
        raise ValueError(f"{path}: found no record, expected a geometry log")
    for number, record in enumerate(records, start=1):
        for key, kind in kinds.items():
            if not isinstance(value := record.get(key), kind):
                raise ValueError(f"{path}, line {number}: {key}: found {value!r}, expected {kind}")
    return records


def read_pool(paths: Iterable[str | Path], family: str | None = None) -> Pool:
    """Read geometry logs.

    Args:
        paths: Files of JSON lines, as described above.
        family: Use only records of this family; all by default.

    Raises:
        ValueError: A file cannot be read, a line is malformed, or nothing valid is left.
    """
    ell_by_type: dict[str, list[float]] = {}
    families: set[str] = set()
    num_invalid = 0
    for path in map(Path, paths):
        for record in read_geometry(path, _KINDS):
            families.add(record["family"])
            if family is not None and record["family"] != family:
                continue
            ell = static_ell(*(record[key] for key in _SIZES))
            if ell is None:
                num_invalid += 1
            else:
                ell_by_type.setdefault(record["operator_type"], []).append(ell)
    if not ell_by_type:
        wanted = "" if family is None else f" of family {family!r}"
        known = ", ".join(sorted(families)) or "none"
        raise ValueError(f"logs: found no valid record{wanted} (families: {known})")
    used = (family,) if family is not None else tuple(sorted(families))
    ordered = {name: ell_by_type[name] for name in sort_operator_types(ell_by_type)}
    return Pool(ordered, used, num_invalid)


_SIZES = ("sigma_min", "sigma_max", "frobenius")
_KINDS = dict.fromkeys(("family", "operator_type"), str) | dict.fromkeys(_SIZES, NUMBER)


def static_ell(
    sigma_min: float | None, sigma_max: float | None, frobenius: float | None
) -> float | None:
    """``max(sigma_min, tau * sigma_max) / frobenius``, the reading of offline schedules.

    (The controller clamps ``sigma_min`` at ``tau`` itself; the geometry metrics take the smallest
    singular value above it.)

    Returns:
        A number in (0, 1]; ``None`` for a matrix that is all zero or not finite.
    """
    sizes = (sigma_min, sigma_max, frobenius)
    low, high, norm = (math.nan if one is None else one for one in sizes)
    if not all(map(math.isfinite, (low, high, norm))) or norm <= 0:
        return None
    # A matrix of rank one has sigma_max = frobenius, up to rounding.
    ell = min(max(low, TAU * high) / norm, 1.0)
    return ell if ell > 0 else None


def percentile(values: Sequence[float], percent: int) -> float:
    """The conventional percentile: linear between the two nearest ranks.

    Args:
        values: At least one.
        percent: 1 to 99.
    """
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def sufficient_steps(ell: float, tolerance: float) -> int | None:
    """The fewest steps, 1 to 8, with ``1 - simulate(ell, steps) <= tolerance``.

    Returns:
        ``None`` where even 8 steps do not suffice.
    """
    enough = (k for k in range(1, MAX_STEPS + 1) if 1.0 - simulate(ell, k) <= tolerance)
    return next(enough, None)


def make_table(pool: Pool, rule: str, tolerance: float) -> dict[str, Any]:
    """The static schedule of a pool.

    Args:
        pool: What :func:`read_pool` gives.
        rule: ``typical``, ``conservative`` or ``floor``.
        tolerance: The error allowed after the last step, in (0, 1).

    Returns:
        The content of a schedule file (`torchtitan_ext.config.schedule_file`); a type for which 8
        steps do not suffice has 8, and is named under ``parameters.insufficient``.

    Raises:
        ValueError: ``tolerance`` is out of range.
    """
    if not 0.0 < tolerance < 1.0:
        raise ValueError(f"--tolerance: found {tolerance!r}, expected a number in (0, 1)")
    schedules, insufficient = {}, []
    for name, values in pool.ell_by_type.items():
        ell = percentile(values, RULES[rule])
        steps = sufficient_steps(ell, tolerance)
        if steps is None:
            insufficient.append(name)
        # The lower bound is composed as it is: the norm scale is part of Muon-PE's recipe.
        schedules[name] = {
            "ell": ell,
            "steps": steps or MAX_STEPS,
            "norm_scale": SAFETY,
            "preconditioner": "frobenius",
            "coefficients": compose(ell, steps or MAX_STEPS),
        }
    parameters = {
        "rule": rule,
        "percentile": RULES[rule],
        "tolerance": tolerance,
        "tau": TAU,
        "families": ", ".join(pool.families),
        "num_records": sum(map(len, pool.ell_by_type.values())),
        "num_invalid": pool.num_invalid,
        "insufficient": ", ".join(insufficient),
    }
    source = "amo_paper static-schedule: Polar Express compositions for percentiles of measured ell"
    return {"format": 1, "source": source, "parameters": parameters, "schedules": schedules}


def to_toml(table: Mapping[str, Any]) -> str:
    """A schedule file as text; floats keep their bits."""
    parts = [
        _lines({name: table[name] for name in ("format", "source")}),
        "[parameters]\n" + _lines(table["parameters"]),
    ]
    for name, section in table["schedules"].items():
        parts.append(f"[schedules.{json.dumps(name)}]\n" + _lines(section))
    return "\n".join(parts)


def _lines(values: Mapping[str, Any]) -> str:
    """Fields of TOML, whose strings, numbers and arrays are those of JSON."""
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())


def add_commands(subparsers: Any) -> None:
    """Register ``static-schedule``."""
    parser = subparsers.add_parser(
        "static-schedule",
        help="make fixed schedules from geometry logs",
        description="Make a schedule file for `[optimizer.muon] schedule_file` from the geometry "
        "logs of earlier runs: per operator type a percentile of ell, and the fewest "
        "Newton-Schulz steps that suffice for it.",
    )
    parser.add_argument("logs", nargs="+", metavar="LOG", help="geometry logs (JSON lines)")
    parser.add_argument(
        "--rule",
        choices=tuple(RULES),
        default="typical",
        help="percentile 50, 25 or 10 of ell (default %(default)s)",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1e-2,
        help="error allowed after the last step (default %(default)s)",
    )
    parser.add_argument("--family", help="pool the records of this family (default: of all)")
    parser.add_argument("-o", "--output", type=Path, required=True, help="file to write")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the schedule file for parsed arguments.

    Raises:
        ValueError: See :func:`read_pool` and :func:`make_table`.
    """
    pool = read_pool(args.logs, args.family)
    table = make_table(pool, args.rule, args.tolerance)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    files.replace(args.output, to_toml(table))
    for name, section in table["schedules"].items():
        print(f"{name:<10} ell {section['ell']:.3e}  {section['steps']} steps")
    if insufficient := table["parameters"]["insufficient"]:
        print(f"warning: {MAX_STEPS} steps do not reach the tolerance for {insufficient}")
    if pool.num_invalid:
        print(f"{pool.num_invalid} records left out (all zero, or not finite)")
    print(f"written to {args.output}")
    return 0
