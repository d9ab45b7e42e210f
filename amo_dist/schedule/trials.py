"""Errors that trial schedules leave of observed spectra, and the best one of each number of steps.

An observation tries every number of steps that a plan may give, with every ``ell`` of a grid, on
the singular values of each sampled matrix. The errors are exact: a schedule maps each singular
value by itself, say to ``y``. There are two, both means over the directions of the short side: the
squared *residual* ``(y^2 - 1)^2``, and the squared *distance* to the polar factor ``(y - 1)^2``;
where updates have the exact norm, that of ``y`` scaled to it. Times `MatrixInfo.weight` the
distance is the squared error of the update.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from amo_dist.schedule import fields
from amo_dist.schedule.observation import Observed
from amo_dist.schedule.polar_express import composed, error_curve, scaled
from amo_dist.schedule.types import Schedule

_MANTISSAS = (1.0, 1.26, 1.58, 2.0, 2.51, 3.16, 3.98, 5.01, 6.31, 7.94)
GRID = (*(float(f"{m}e{exponent}") for exponent in range(-5, -1) for m in _MANTISSAS), 0.1)
"""Every ``ell`` that is tried, beside ``base_ell``: ten a decade."""

Errors = Sequence[float]
"""Residuals of all trials of one matrix or group, then their distances."""


@dataclasses.dataclass(frozen=True, slots=True)
class Measured(fields.Stored):
    """Mean errors of the sampled matrices of one group, by the number of steps.

    Sequences have one entry for each number of steps that was tried, from ``min_steps`` on.
    """

    min_steps: fields.Steps
    """Fewest steps that were tried."""
    ells: tuple[fields.Ell, ...]
    """Effective ``ell`` for which the schedule of so many steps is composed."""
    residuals: tuple[fields.Float, ...]
    """Mean squared residuals."""
    distances: tuple[fields.Float, ...]
    """Mean squared distances to the polar factor."""
    uniform_residual: fields.Float
    """Mean squared residual that the uniform schedule leaves."""
    uniform_distance: fields.Float
    """Mean squared distance that the uniform schedule leaves."""

    @property
    def max_steps(self) -> int:
        """Most steps that were tried."""
        return self.min_steps + len(self.ells) - 1

    def ell(self, steps: int) -> float:
        """``ell`` of the schedule of so many steps."""
        return self.ells[steps - self.min_steps]

    def residual(self, steps: int) -> float:
        """Mean squared residual after so many steps."""
        return self.residuals[steps - self.min_steps]

    def distance(self, steps: int) -> float:
        """Mean squared distance after so many steps."""
        return self.distances[steps - self.min_steps]

    def within(self, low: int, high: int) -> Measured:
        """The same for ``low`` to ``high`` steps alone."""
        part = slice(low - self.min_steps, high - self.min_steps + 1)
        names = ("ells", "residuals", "distances")
        parts = {name: getattr(self, name)[part] for name in names}
        return dataclasses.replace(self, min_steps=low, **parts)

    def _check(self, field: str) -> None:
        for key in ("residuals", "distances"):
            fields.read_list(f"{field}.{key}", getattr(self, key), len(self.ells))


@dataclasses.dataclass(frozen=True, slots=True)
class Trials:
    """The schedules that an observation tries, and what follows from their errors.

    Attributes:
        steps: Numbers of steps that a plan may give.
        base_steps: Steps of the uniform schedule, which is always tried.
        base_ell: ``ell`` of the uniform schedule.
    """

    steps: range
    base_steps: int
    base_ell: float

    @property
    def _tried_steps(self) -> list[int]:
        return sorted({*self.steps, self.base_steps})

    @property
    def _ells(self) -> list[float]:
        return sorted({*GRID, self.base_ell})

    @property
    def count(self) -> int:
        """Number of trials."""
        return len(self._tried_steps) * len(self._ells)

    def schedules(self) -> tuple[Schedule, ...]:
        """All that are tried, in the order of measured errors."""
        return tuple(composed(ell, k) for k in self._tried_steps for ell in self._ells)

    def best(self, errors: Errors | None) -> Measured:
        """The ``ell`` of least distance for each number of steps; ties go to the greater.

        Args:
            errors: Mean errors of one group; None where it had no valid matrix.
        """
        if errors is None:
            return self._unobserved()
        ells = self._ells
        rows = [self._row(errors, k) for k in self.steps]
        places = [min(range(len(ells)), key=lambda j: (row[j][1], -j)) for row in rows]
        pairs = [row[j] for row, j in zip(rows, places, strict=True)]
        return self._measured(errors, [ells[j] for j in places], pairs)

    def at(self, errors: Errors | None, ell: float) -> Measured:
        """Errors of schedules composed for one ``ell``, linear between those of the grid.

        Args:
            errors: Argument of `best`.
            ell: Effective ``ell``.
        """
        if errors is None:
            return self._unobserved()
        ells = self._ells
        i = min(max(bisect_left(ells, ell), 1), len(ells) - 1)
        share = min(max((ell - ells[i - 1]) / (ells[i] - ells[i - 1]), 0.0), 1.0)
        pairs = []
        for k in self.steps:
            (r0, d0), (r1, d1) = self._row(errors, k)[i - 1 : i + 1]
            pairs.append((r0 + share * (r1 - r0), d0 + share * (d1 - d0)))
        return self._measured(errors, [ell] * len(pairs), pairs)

    def _unobserved(self) -> Measured:
        """Errors as if all singular values were at ``base_ell``, without the exact norm."""
        worst = error_curve(scaled(self.base_ell), self._tried_steps)
        defects = {k: e * (2 - e) for k, e in worst.items()}  # 1 - y^2 of y = 1 - e
        pairs = {k: (defects[k] * defects[k], e * e) for k, e in worst.items()}
        residuals, distances = zip(*(pairs[k] for k in self.steps), strict=True)
        ells = (self.base_ell,) * len(self.steps)
        return Measured(self.steps[0], ells, residuals, distances, *pairs[self.base_steps])

    def _row(self, errors: Errors, k: int) -> list[tuple[float, float]]:
        """Squared residual and squared distance by ``ell``."""
        width, count = len(self._ells), self.count
        start = self._tried_steps.index(k) * width
        residuals, distances = errors[start : start + width], errors[count + start :]
        return list(zip(residuals, distances[:width], strict=True))

    def _measured(
        self, errors: Errors, ells: Sequence[float], pairs: Sequence[tuple[float, float]]
    ) -> Measured:
        residuals, distances = zip(*pairs, strict=True)
        uniform = self._row(errors, self.base_steps)[self._ells.index(self.base_ell)]
        return Measured(self.steps[0], tuple(ells), residuals, distances, *uniform)


@dataclasses.dataclass(frozen=True, slots=True)
class ErrorSums(fields.Stored):
    """Errors of all trials by group, added up over observations."""

    totals: Mapping[str, fields.Floats]
    """Mean over the valid matrices of an observation, summed over observations."""
    counts: Mapping[str, fields.CountOrZero]
    """Observations with a valid matrix."""

    @classmethod
    def empty(cls, groups: Iterable[str], trials: Trials) -> ErrorSums:
        """Sums of no observation."""
        zeros = fields.Packed([0.0] * (2 * trials.count))
        groups = tuple(groups)
        return cls(dict.fromkeys(groups, zeros), dict.fromkeys(groups, 0))

    def plus(self, by_group: Mapping[str, Sequence[tuple[float, Observed]]]) -> ErrorSums:
        """The sums with one more observation.

        Args:
            by_group: Weight and spectrum of each valid matrix of a group, in a fixed order.
        """
        totals, counts = dict(self.totals), dict(self.counts)
        for group, weighted in by_group.items():
            if weighted:
                most = max(weight for weight, _ in weighted)
                # Matrices of weight zero alone count alike: nothing is divided by zero.
                shares = [weight / most if most else 1.0 for weight, _ in weighted]
                whole = math.fsum(shares)
                rows = ([*observed.residuals, *observed.distances] for _, observed in weighted)
                means = [
                    math.fsum(map(operator.mul, shares, errors)) / whole
                    for errors in zip(*rows, strict=True)
                ]
                totals[group] = fields.Packed(map(operator.add, totals[group], means))
                counts[group] += 1
        return ErrorSums(totals, counts)

    def mean(self, group: str) -> Errors | None:
        """The mean over observations; None for a group that never had a valid matrix."""
        count = self.counts[group]
        return [total / count for total in self.totals[group]] if count else None

    def check_trials(self, trials: Trials, field: str) -> None:
        """Refuse the sums of other trials.

        Raises:
            ValueError: Names the part.
        """
        expected = 2 * trials.count
        for group, total in self.totals.items():
            if len(total) != expected:
                text = f"{expected}: other schedules were tried, under other settings"
                fields.fail(f"{field}.totals.{group}", f"{len(total)} errors", text)

    def _check(self, field: str) -> None:
        if list(self.counts) != list(self.totals):
            fields.fail(f"{field}.counts", list(self.counts), f"the groups {list(self.totals)}")
