"""The plan: how many Newton-Schulz steps each group of matrices gets, for which ``ell``, why."""

from __future__ import annotations

import dataclasses
import json
import math
import operator
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Annotated, TypeAlias

from amo_dist.schedule import budget as budgets
from amo_dist.schedule import fields
from amo_dist.schedule.polar_express import composed, scaled
from amo_dist.schedule.trials import Measured
from amo_dist.schedule.types import Schedule

PLAN_FILE = "plan.json"
"""Name of the file in a run's folder, once AMO has planned."""

StepsAndElls: TypeAlias = Mapping[str, tuple[int, float]]
"""Newton-Schulz steps and effective ``ell`` of each group of matrices."""


OBJECTIVES = {
    "update": "squared error of the update",
    "projected": "projected error",
}
"""Name of the objective that a plan minimises, by its ``criterion``."""


@dataclasses.dataclass(frozen=True, slots=True)
class Plan(fields.Stored):
    """The plan that AMO commits to. Sequences are in the order of ``operator_types``.

    It is complete in itself: every schedule from the plan on follows from it alone.
    """

    operator_types: tuple[fields.Name, ...]
    """Operator types, in their declared order."""
    ell_robust: tuple[fields.Ell, ...]
    """Observed effective ``ell``: the median over observations of their medians."""
    ell_target: tuple[fields.Ell, ...]
    """Value of ``ell`` for which the coefficients are made, at ``SAFETY`` times it. A measured plan
    takes the ``ell`` of least error for its steps, the paper's ``ell_robust`` shrunk toward
    ``base_ell``."""
    base_steps: fields.Steps
    base_ell: fields.Ell
    planner: Annotated[str, fields.choice("measured", "paper")]
    """Rule that made the plan, as the setting names it."""
    budget_unit: Annotated[str, fields.choice("steps", "flops")]
    budget: fields.Count
    """Most ``flops`` that one optimizer step may take, or exact total of ``steps``."""
    min_steps: fields.Steps
    """Fewest steps of a group, after the budget lowered the setting if it had to."""
    max_steps: fields.Steps
    """Most steps of a group, after the budget raised the setting if it had to."""
    costs: tuple[fields.Count, ...] | None
    """Flops of one Newton-Schulz step of all matrices of each group; ``None`` if unknown."""
    curves: tuple[tuple[fields.Float, ...], ...]
    """Error of each group at ``min_steps`` to ``max_steps`` steps, as ``criterion`` defines it."""
    allocation: tuple[fields.Steps, ...]
    """Planned steps of each group."""
    objective: fields.Float
    """Errors of the allocation, summed over groups, each times its weight."""
    criterion: Annotated[str, fields.choice("update", "projected")] = "projected"
    """Objective that the plan minimises. ``update``: squared error of the update relative to its
    squared norm, from the sampled matrices of each group. ``projected``: error of a singular value
    at ``ell_target``."""
    num_matrices: tuple[fields.Count, ...] | None = None
    """Matrices of each group; None if unknown."""
    measured: tuple[Measured, ...] | None = None
    """Errors of the schedules of each group on its spectra; None without spectra."""
    weights: tuple[fields.Float, ...] | None = None
    """Share of each group in the whole update's squared norm, by which its error counts; None if
    each counts one."""

    def __str__(self) -> str:
        """Table beside the uniform schedule: ``ell``, steps, error and flops of each group.

        Errors are root mean squares where spectra were observed, else projected errors.
        """
        word = self.error_name
        before, after = errors_beside_uniform(self)
        groups = zip(
            self.operator_types, self.ell_target, self.allocation, before, after, strict=True
        )
        rows = [("operator type", "ell target", "steps before", "after", f"{word} before", "after")]
        rows += [
            (name, f"{ell:.5e}", f"{self.base_steps}", f"{steps}", f"{old:.4f}", f"{new:.4f}")
            for name, ell, steps, old, new in groups
        ]
        total = self.base_steps * len(self.operator_types)
        rows.append(("total", "", f"{total}", f"{sum(self.allocation)}", "", ""))
        table = [list(row) for row in rows]
        if self.costs is not None:
            more = [
                (steps - self.base_steps) * cost
                for steps, cost in zip(self.allocation, self.costs, strict=True)
            ]
            cells = ["NS Gflop/step", *(f"{flops / 1e9:+.4g}" for flops in (*more, sum(more)))]
            for row, text in zip(table, cells, strict=True):
                row.append(text)
        return "\n".join([*_aligned(table), *_summary(self)])

    @property
    def errors(self) -> tuple[float, ...]:
        """The error of each group under the plan."""
        chosen = zip(self.curves, self.allocation, strict=True)
        return tuple(curve[steps - self.min_steps] for curve, steps in chosen)

    @property
    def uniform_errors(self) -> tuple[float, ...]:
        """The error of each group under the uniform schedule."""
        if self.criterion == "update" and self.measured is not None:
            return tuple(measured.uniform_distance for measured in self.measured)
        uniform = composed(self.base_ell, self.base_steps)
        lowest = (scaled(min(ell, self.base_ell)) for ell in self.ell_target)
        return tuple(1.0 - uniform.image(ell) for ell in lowest)

    @property
    def uniform_objective(self) -> float:
        """The objective of the uniform schedule."""
        return self._weighted(self.uniform_errors)

    @property
    def error_name(self) -> str:
        """Figures of each group for reports; a root mean square if spectra were observed."""
        if self.measured is None:
            return "projected error"
        return "distance" if self.criterion == "update" else "residual"

    def _weighted(self, errors: Sequence[float]) -> float:
        """The objective of errors of the groups."""
        return budgets.weighted_sum(errors, self.weights or (1,) * len(errors))

    @property
    def flops_ratio(self) -> float | None:
        """Flops of the plan over those of the uniform schedule; None where costs are unknown."""
        if self.costs is None:
            return None
        spent = sum(map(operator.mul, self.costs, self.allocation))
        return float(spent / (self.base_steps * sum(self.costs)))

    def schedules(self) -> dict[str, Schedule]:
        """The planned schedule of each group."""
        planned = zip(self.operator_types, self.ell_target, self.allocation, strict=True)
        return {name: composed(ell, steps) for name, ell, steps in planned}

    def state_at(self, progress: Fraction) -> StepsAndElls:
        """Steps and effective ``ell`` of each group on the way from the uniform schedule.

        Both interpolate linearly in exact arithmetic. A plan by the error of the update rounds the
        steps of each group by themselves, halves toward the plan, so that none turns back. Of any
        other the total of steps is rounded half up first, as in the AMO paper, then the counts, by
        largest remainder, so that they sum to it.

        Args:
            progress: Share of the way, in [0, 1]; 1 is the plan.
        """

        def between(first: float, last: float) -> Fraction:
            return Fraction(first) + progress * (Fraction(last) - Fraction(first))

        exact = [between(self.base_steps, steps) for steps in self.allocation]
        if self.criterion == "update":
            steps = list(map(_round_toward, exact, self.allocation))
        else:
            steps = _round_to_sum(exact)
        ells = (float(between(self.base_ell, ell)) for ell in self.ell_target)
        return dict(zip(self.operator_types, zip(steps, ells, strict=True), strict=True))

    def to_json(self) -> str:
        """Text from which ``from_json`` restores the plan bit for bit."""
        return json.dumps(self.to_dict(), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read and check what ``to_json`` wrote.

        Raises:
            ValueError: The text is not JSON, or as for ``from_dict``.
        """
        return cls.from_dict(fields.read_json("plan", text), "plan")

    def _check(self, field: str) -> None:
        num_groups = len(self.operator_types)
        names = ("ell_robust", "ell_target", "curves", "allocation", "costs", "num_matrices")
        for key in (*names, "measured", "weights"):
            entries = getattr(self, key)
            if entries is not None and len(entries) != num_groups:
                fields.fail(f"{field}.{key}", entries, f"one entry for each of {num_groups} groups")
        needed = (self.measured, self.weights, self.num_matrices, self.costs)
        if self.criterion == "update" and None in needed:
            fields.fail(f"{field}.criterion", self.criterion, "'projected' without measurements")
        num_steps = self.max_steps - self.min_steps + 1
        for i, (curve, steps) in enumerate(zip(self.curves, self.allocation, strict=True)):
            fields.read_list(f"{field}.curves[{i}]", curve, num_steps)
            fields.read_int(f"{field}.allocation[{i}]", steps, self.min_steps, self.max_steps)
        for i, measured in enumerate(self.measured or ()):
            if measured.min_steps > self.min_steps or measured.max_steps < self.max_steps:
                tried = f"{measured.min_steps} to {measured.max_steps} steps"
                fields.fail(
                    f"{field}.measured[{i}]", tried, f"{self.min_steps} to {self.max_steps} steps"
                )


def _round_toward(value: Fraction, end: int) -> int:
    """The nearest integer; of two, the one that is nearer to the end."""
    half = Fraction(1, 2)
    return math.floor(value + half) if value <= end else math.ceil(value - half)


def _round_to_sum(values: Sequence[Fraction]) -> list[int]:
    """Integers that sum to the rounded sum, by largest remainder; ties to the earlier."""
    counts = [math.floor(value) for value in values]
    by_remainder = sorted(range(len(values)), key=lambda i: (counts[i] - values[i], i))
    for i in by_remainder[: budgets.round_half_up(sum(values, Fraction(0))) - sum(counts)]:
        counts[i] += 1
    return counts


def errors_beside_uniform(plan: Plan) -> tuple[list[float], list[float]]:
    """The error of each group under the uniform schedule, and under the plan.

    Root mean squares over the sampled matrices, where there are any; else projected errors.
    """
    before, after = plan.uniform_errors, plan.errors
    if plan.measured is None:
        return list(before), list(after)
    if plan.criterion == "projected":
        chosen = zip(plan.measured, plan.allocation, strict=True)
        before = tuple(measured.uniform_residual for measured in plan.measured)
        after = tuple(measured.residual(steps) for measured, steps in chosen)
    return list(map(math.sqrt, before)), list(map(math.sqrt, after))


def starved(plan: Plan) -> list[str]:
    """Steps that a plan by the paper's passes takes from its groups, one per line; no other does.

    A group is starved where it gets fewer steps than an easier one. One more line names the others
    whose error is above that under the uniform schedule.
    """
    if plan.planner != "paper":
        return []
    error_name = plan.error_name
    errors = list(zip(*errors_beside_uniform(plan), strict=True))
    groups, steps, lines, rising = range(len(errors)), plan.allocation, [], []
    for i in sorted(groups, key=lambda i: errors[i][0] - errors[i][1]):
        name, (old, new) = plan.operator_types[i], errors[i]
        easier = [j for j in groups if plan.ell_target[j] > plan.ell_target[i]]
        most = max(easier, key=lambda j: steps[j], default=i)
        if steps[most] > steps[i]:
            lines.append(
                f"the plan starves {name}: {steps[i]} Newton-Schulz steps, where the easier "
                f"{plan.operator_types[most]} gets {steps[most]}; {error_name} {new:.4f} "
                f"(uniform: {old:.4f})"
            )
        elif new > old:
            rising.append(f"{name} from {old:.4f} to {new:.4f}")
    if rising:
        lines.append(f"the plan raises the {error_name} of {', '.join(rising)}")
    return lines


def _summary(plan: Plan) -> list[str]:
    kind = OBJECTIVES[plan.criterion]
    flops = "" if plan.flops_ratio is None else f" at {plan.flops_ratio:.1%} of its flops"
    change = plan.objective / plan.uniform_objective - 1 if plan.uniform_objective else 0.0
    limits = f"{plan.min_steps} to {plan.max_steps} steps per type"
    uniform = f"uniform: {plan.uniform_objective:.5f}, {change:+.1%}"
    return [
        f"{kind} {plan.objective:.5f} ({uniform}){flops}",
        f"budget {plan.budget} {plan.budget_unit}, {limits}, planner {plan.planner}",
    ]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
