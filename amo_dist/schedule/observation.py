"""What an observation records: which matrices are drawn, and their medians by operator type."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from amo_dist.config import sort_operator_types
from amo_dist.schedule import fields
from amo_dist.schedule.polar_express import SAFETY

_ELL_SLACK = 1e-6
"""How far rounding may take an ``ell`` above 1; farther is a mistake of the caller."""


def draw(
    seed: int, step: int, operator_type: str, names: Sequence[str], size: int
) -> tuple[str, ...]:
    """Draw names uniformly without replacement, alike on every rank, machine and Python version.

    Args:
        seed: Seed of the run.
        step: Optimizer step.
        operator_type: Operator type the names belong to.
        names: What to draw from, in a fixed order.
        size: How many to draw; all, where there are fewer.

    Returns:
        The names drawn, in the order of ``names``.
    """
    key = hashlib.sha256(f"{seed}/{step}/{operator_type}".encode()).digest()
    # Of the standard generator only random() is promised to stay the same for an integer seed,
    # so a Fisher-Yates shuffle is spelled out, as far as it is needed.
    generator = random.Random(int.from_bytes(key, "big"))
    indices = list(range(len(names)))
    size = min(size, len(names))
    for i in range(size):
        j = i + int(generator.random() * (len(names) - i))
        indices[i], indices[j] = indices[j], indices[i]
    return tuple(names[i] for i in sorted(indices[:size]))


@dataclasses.dataclass(frozen=True, slots=True)
class Observation:
    """What one observation recorded, by operator type."""

    step: int
    ell: Mapping[str, float | None]
    """Median effective ``ell`` of the valid matrices; ``None`` where none was valid."""
    num_sampled: Mapping[str, int]
    num_invalid: Mapping[str, int]
    """Matrices with a non-finite entry, or with zeros alone, which contribute nothing."""

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values, floats as ``float.hex()``."""
        texts = {t: None if e is None else fields.write_float(e) for t, e in self.ell.items()}
        return {
            "step": self.step,
            "ell": texts,
            "num_sampled": dict(self.num_sampled),
            "num_invalid": dict(self.num_invalid),
        }

    @classmethod
    def from_dict(cls, found: object, field: str) -> Observation:
        """Read and validate what ``to_dict`` wrote; ``field`` names it in errors.

        Raises:
            ValueError: A field is missing, unknown, malformed or at odds with another.
        """
        record = fields.read_record(field, found, [f.name for f in dataclasses.fields(cls)])
        step = fields.read_int(f"{field}.step", record["step"], 1)
        if not isinstance(record["ell"], Mapping):
            fields.fail(f"{field}.ell", record["ell"], "a mapping by operator type")
        names = sort_operator_types(fields.read_names(f"{field}.ell", list(record["ell"])))
        ell: dict[str, float | None] = {}
        counts: dict[str, dict[str, int]] = {"num_sampled": {}, "num_invalid": {}}
        for key, minimum in (("num_sampled", 1), ("num_invalid", 0)):
            by_type = fields.read_record(f"{field}.{key}", record[key], names)
            for name in names:
                place = f"{field}.{key}.{name}"
                counts[key][name] = fields.read_int(place, by_type[name], minimum)
        for name in names:
            text, place = record["ell"][name], f"{field}.ell.{name}"
            ell[name] = None if text is None else fields.read_ell(place, text)
            num_valid = counts["num_sampled"][name] - counts["num_invalid"][name]
            if num_valid < 0 or (num_valid == 0) != (text is None):
                fields.fail(place, text, f"the median of {num_valid} valid matrices (null: none)")
        return cls(step, ell, **counts)


def robust_ells(observations: Sequence[Observation]) -> dict[str, float | None]:
    """The median over observations of their medians, by type; ``None`` where none was valid."""
    robust: dict[str, float | None] = {}
    for operator_type in observations[0].ell:
        medians = [ell for o in observations if (ell := o.ell[operator_type]) is not None]
        robust[operator_type] = statistics.median(medians) if medians else None
    return robust


def effective_ell(name: str, ell_raw: float) -> float | None:
    """``ell_raw / SAFETY``, or ``None`` for a matrix without a valid ``ell``."""
    is_real = isinstance(ell_raw, (int, float)) and not isinstance(ell_raw, bool)
    if not is_real or ell_raw < 0 or 1 + _ELL_SLACK < ell_raw < math.inf:
        fields.fail(f"ell_by_name.{name}", ell_raw, "a number in (0, 1], or NaN")
    if not math.isfinite(ell_raw) or ell_raw == 0:
        return None
    return min(float(ell_raw), 1.0) / SAFETY
