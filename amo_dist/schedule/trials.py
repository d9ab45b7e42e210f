"""What trial schedules leave of observed spectra, and the best of them for each number of steps.

An observation tries every number of steps that a plan may give, with every ``ell`` of a grid, on
the singular values of each sampled matrix, and the fixed schedules that a plan may be compared
with. The errors are exact: a schedule maps each singular value by itself, say to ``y``. There are
two, both means over the directions of the short side: the squared *residual* ``(y^2 - 1)^2``, and
the squared *distance* to the polar factor ``(y - 1)^2``; where updates have the exact norm, that of
``y`` scaled to it. Times `MatrixInfo.weight` the distance is the squared error of the update.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from amo_dist.schedule import fields
from amo_dist.schedule.coefficients import NAMED_SCHEDULES
from amo_dist.schedule.polar_express import SAFETY, composed, error_curve, scaled
from amo_dist.schedule.types import MatrixInfo, Schedule

_MANTISSAS = (1.0, 1.26, 1.58, 2.0, 2.51, 3.16, 3.98, 5.01, 6.31, 7.94)
GRID = (*(float(f"{m}e{exponent}") for exponent in range(-5, -1) for m in _MANTISSAS), 0.1)
"""Every ``ell`` that is tried, beside ``base_ell``: ten a decade."""

Errors = Sequence[float]
"""As `Trials.errors_of` has them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Measured(fields.Stored):
    """What schedules leave of the sampled matrices of one group, on average.

    Sequences have one entry for each number of steps that the plan may give.
    """

    ells: tuple[fields.Ell, ...]
    """Effective ``ell`` for which the schedule of so many steps is composed."""
    residuals: tuple[fields.Float, ...]
    distances: tuple[fields.Float, ...]
    uniform_residual: fields.Float
    uniform_distance: fields.Float
    references: Mapping[str, fields.Float]
    """The distance that each fixed schedule leaves, by its name."""

    def distance_of(self, name: str) -> float:
        """What a fixed schedule, or ``uniform``, leaves.

        Raises:
            ValueError: It is not one of those that are measured.
        """
        found = {"uniform": self.uniform_distance, **self.references}
        if name not in found:
            fields.fail("as_good_as", name, f"one of {', '.join(found)}")
        return found[name]

    def _check(self, field: str) -> None:
        for key in ("residuals", "distances"):
            fields.read_list(f"{field}.{key}", getattr(self, key), len(self.ells))


def _rescaled(schedule: Schedule) -> Schedule:
    """The same schedule of an input that is smaller, as of the others that are tried."""
    s = SAFETY / schedule.norm_scale
    (a, b, c), *rest = schedule.coefficients
    first = a * s, b * (s * s * s), c * (s * s * s * s * s)
    return Schedule((first, *rest), norm_scale=SAFETY)


_BY_TYPE: Mapping[str, Mapping[str, Schedule]] = {
    name: {"": _rescaled(found.schedule)}
    | {kind: _rescaled(one) for kind, one in found.by_type.items()}
    for name, found in NAMED_SCHEDULES.items()
    # What AOL makes of a matrix does not follow from its singular values; ten steps are nothing
    # that a plan of fewer could be as good as.
    if found.schedule.preconditioner == "frobenius" and name != "deepseek_v4"
}
REFERENCES: tuple[str, ...] = tuple(sorted(_BY_TYPE))
"""Fixed schedules that a plan may be compared with."""
_FIXED = tuple(dict.fromkeys(one for found in _BY_TYPE.values() for one in found.values()))
"""All different ones among them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Trials:
    """The schedules that an observation tries, and what follows from their errors.

    Attributes:
        steps: Numbers of steps that the plan may give.
        base_steps: Of the uniform schedule, which is always tried.
        base_ell: Of the uniform schedule.
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
    def num_composed(self) -> int:
        """Trials without the fixed schedules."""
        return len(self._tried_steps) * len(self._ells)

    def schedules(self) -> tuple[Schedule, ...]:
        """All that are tried, in the order of measured errors."""
        tried = (composed(ell, k) for k in self._tried_steps for ell in self._ells)
        return (*tried, *_FIXED)

    def errors_of(self, matrix: MatrixInfo, found: Sequence[float]) -> Errors:
        """What is kept of the errors of one matrix.

        Args:
            matrix: Which it is.
            found: The residuals that all of `schedules` leave, then the distances.

        Returns:
            Residuals and distances of composed schedules, then distances of `REFERENCES`.
        """
        count, fixed = self.num_composed, dict(zip(_FIXED, found[-len(_FIXED) :], strict=True))
        start = count + len(_FIXED)
        references = (_BY_TYPE[name] for name in REFERENCES)
        left = [fixed[one.get(matrix.operator_type, one[""])] for one in references]
        return [*found[:count], *found[start : start + count], *left]

    def best(self, errors: Errors | None) -> Measured:
        """The ``ell`` of least distance for each number of steps; ties go to the greater.

        Args:
            errors: Of one group, on average; None where it had no valid matrix.
        """
        if errors is None:
            return self._unobserved()
        ells = self._ells
        rows = [self._row(errors, k) for k in self.steps]
        places = [min(range(len(ells)), key=lambda j: (row[j][1], -j)) for row in rows]
        found = [row[j] for row, j in zip(rows, places, strict=True)]
        return self._measured(errors, [ells[j] for j in places], found)

    def at(self, errors: Errors | None, ell: float) -> Measured:
        """Of schedules composed for one ``ell``, linear between those of the grid.

        Args:
            errors: As for `best`.
            ell: Effective.
        """
        if errors is None:
            return self._unobserved()
        ells = self._ells
        i = min(max(bisect_left(ells, ell), 1), len(ells) - 1)
        share = min(max((ell - ells[i - 1]) / (ells[i] - ells[i - 1]), 0.0), 1.0)
        found = []
        for k in self.steps:
            (r0, d0), (r1, d1) = self._row(errors, k)[i - 1 : i + 1]
            found.append((r0 + share * (r1 - r0), d0 + share * (d1 - d0)))
        return self._measured(errors, [ell] * len(found), found)

    def _unobserved(self) -> Measured:
        """As if all singular values were at ``base_ell``, and updates had no exact norm."""
        least = scaled(self.base_ell)
        worst = error_curve(least, self._tried_steps)
        defects = {k: e * (2 - e) for k, e in worst.items()}  # 1 - y^2 of y = 1 - e
        pairs = {k: (defects[k] * defects[k], e * e) for k, e in worst.items()}
        residuals, distances = zip(*(pairs[k] for k in self.steps), strict=True)
        ells = (self.base_ell,) * len(self.steps)
        left = {name: 1 - _BY_TYPE[name][""].image(least) for name in REFERENCES}
        references = {name: error * error for name, error in left.items()}
        return Measured(ells, residuals, distances, *pairs[self.base_steps], references)

    def _row(self, errors: Errors, k: int) -> list[tuple[float, float]]:
        """Squared residual and squared distance by ``ell``."""
        width, count = len(self._ells), self.num_composed
        start = self._tried_steps.index(k) * width
        residuals, distances = errors[start : start + width], errors[count + start :]
        return list(zip(residuals, distances[:width], strict=True))

    def _measured(
        self, errors: Errors, ells: Sequence[float], found: Sequence[tuple[float, float]]
    ) -> Measured:
        residuals, distances = zip(*found, strict=True)
        uniform = self._row(errors, self.base_steps)[self._ells.index(self.base_ell)]
        references = dict(zip(REFERENCES, errors[2 * self.num_composed :], strict=True))
        return Measured(tuple(ells), residuals, distances, *uniform, references)


@dataclasses.dataclass(frozen=True, slots=True)
class ErrorSums(fields.Stored):
    """Errors of all trials by group, added up over observations."""

    totals: Mapping[str, fields.Floats]
    """The mean over the valid matrices of an observation, summed over observations."""
    counts: Mapping[str, fields.CountOrZero]
    """Observations with a valid matrix."""

    @classmethod
    def empty(cls, groups: Iterable[str], trials: Trials) -> ErrorSums:
        """Of no observation."""
        zeros = fields.Packed([0.0] * (2 * trials.num_composed + len(REFERENCES)))
        groups = tuple(groups)
        return cls(dict.fromkeys(groups, zeros), dict.fromkeys(groups, 0))

    def plus(self, by_group: Mapping[str, Sequence[tuple[float, Errors]]]) -> ErrorSums:
        """With one more observation.

        Args:
            by_group: The weight and the errors of each valid matrix of a group, in a fixed order.
        """
        totals, counts = dict(self.totals), dict(self.counts)
        for group, found in by_group.items():
            if found:
                most = max(weight for weight, _ in found)
                # Those of weight zero alone are alike, too.
                shares = [weight / most if most else 1.0 for weight, _ in found]
                whole = math.fsum(shares)
                means = [
                    math.fsum(map(operator.mul, shares, errors)) / whole
                    for errors in zip(*(errors for _, errors in found), strict=True)
                ]
                totals[group] = fields.Packed(map(operator.add, totals[group], means))
                counts[group] += 1
        return ErrorSums(totals, counts)

    def mean(self, group: str) -> Errors | None:
        """Over observations; None for a group that never had a valid matrix."""
        count = self.counts[group]
        return [total / count for total in self.totals[group]] if count else None

    def check_trials(self, trials: Trials, field: str) -> None:
        """Refuse the sums of other trials.

        Raises:
            ValueError: Names the part.
        """
        expected = 2 * trials.num_composed + len(REFERENCES)
        for group, total in self.totals.items():
            if len(total) != expected:
                text = f"{expected}: other schedules were tried, under other settings"
                fields.fail(f"{field}.totals.{group}", f"{len(total)} errors", text)

    def _check(self, field: str) -> None:
        if list(self.counts) != list(self.totals):
            fields.fail(f"{field}.counts", list(self.counts), f"the groups {list(self.totals)}")
