"""What an observation records: which matrices are drawn, and their medians by group."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import random
import statistics
from collections.abc import Mapping, Sequence

from amo_dist.schedule import fields
from amo_dist.schedule.polar_express import SAFETY

_ELL_SLACK = 1e-6
"""How far rounding may take an ``ell`` above 1; farther is a mistake of the caller."""


@dataclasses.dataclass(frozen=True, slots=True)
class Observed:
    """The spectrum of one sampled matrix, in the terms that policies ask for."""

    ell: float
    """``sigma_min / ||M||_F``, not divided by the safety factor; NaN for a matrix with a
    non-finite entry or zeros alone, whose errors say nothing."""
    residuals: Sequence[float]
    """Mean squared residual of each of `Policy.trials`."""
    distances: Sequence[float]
    """Mean squared distance to the polar factor of each of them."""


def draw(seed: int, step: int, group: str, names: Sequence[str], size: int) -> tuple[str, ...]:
    """Draw names uniformly without replacement, alike on every rank, machine and Python version.

    Args:
        seed: Seed of the run.
        step: Optimizer step.
        group: Group of the names.
        names: Names to draw from, in a fixed order.
        size: Number to draw; all, if there are fewer.

    Returns:
        The names drawn, in the order of ``names``.
    """
    key = hashlib.sha256(f"{seed}/{step}/{group}".encode()).digest()
    # Python promises only for random() that an integer seed always gives the same numbers: so the
    # part of a Fisher-Yates shuffle that is needed is spelled out.
    generator = random.Random(int.from_bytes(key, "big"))
    indices = list(range(len(names)))
    size = min(size, len(names))
    for i in range(size):
        j = i + int(generator.random() * (len(names) - i))
        indices[i], indices[j] = indices[j], indices[i]
    return tuple(names[i] for i in sorted(indices[:size]))


@dataclasses.dataclass(frozen=True, slots=True)
class Observation(fields.Stored):
    """Record of one observation, by group."""

    step: fields.Count
    ell: Mapping[str, fields.Ell | None]
    """Median effective ``ell`` of the valid matrices; ``None`` where none was valid."""
    num_sampled: Mapping[str, fields.Count]
    num_invalid: Mapping[str, fields.CountOrZero]
    """Matrices with a non-finite entry, or with zeros alone, which contribute nothing."""

    def _check(self, field: str) -> None:
        for key in ("num_sampled", "num_invalid"):
            groups = list(getattr(self, key))
            if groups != list(self.ell):
                fields.fail(f"{field}.{key}", groups, f"the groups of ell, {list(self.ell)}")


def robust_ells(observations: Sequence[Observation]) -> dict[str, float | None]:
    """The median over observations of their medians, by group; ``None`` where none was valid."""
    robust: dict[str, float | None] = {}
    for group in observations[0].ell:
        medians = [ell for o in observations if (ell := o.ell[group]) is not None]
        robust[group] = statistics.median(medians) if medians else None
    return robust


def effective_ell(name: str, ell_raw: float) -> float | None:
    """``ell_raw / SAFETY``, or ``None`` for a matrix without a valid ``ell``."""
    is_real = isinstance(ell_raw, (int, float)) and not isinstance(ell_raw, bool)
    if not is_real or ell_raw < 0 or 1 + _ELL_SLACK < ell_raw < math.inf:
        fields.fail(f"observed_by_name.{name}.ell", ell_raw, "a number in (0, 1], or NaN")
    if not math.isfinite(ell_raw) or ell_raw == 0:
        return None
    return min(float(ell_raw), 1.0) / SAFETY
