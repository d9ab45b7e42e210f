"""The plan: how many Newton-Schulz steps each group of matrices gets, for which ``ell``, why."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import operator
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Annotated, Any, TypeAlias

from amo_dist.config import AMOConfig, sort_operator_types
from amo_dist.schedule import budget as budgets
from amo_dist.schedule import fields
from amo_dist.schedule.polar_express import SAFETY, compose, error_curve
from amo_dist.schedule.types import MatrixInfo, Schedule

logger = logging.getLogger(__name__)

StepsAndElls: TypeAlias = Mapping[str, tuple[int, float]]
"""Newton-Schulz steps and effective ``ell`` of each group of matrices."""


@dataclasses.dataclass(frozen=True, slots=True)
class Plan(fields.Stored):
    """What AMO commits to. Sequences are in the order of ``operator_types``.

    It is complete in itself: every schedule from the plan on follows from it alone.
    """

    operator_types: tuple[fields.Name, ...]
    """The groups of matrices that share a schedule: operator types, unless asked otherwise."""
    ell_robust: tuple[fields.Ell, ...]
    """Observed effective ``ell``: the median over observations of their medians."""
    ell_target: tuple[fields.Ell, ...]
    """``ell_robust`` shrunk toward ``base_ell``; composed for at ``SAFETY`` times this."""
    base_steps: fields.Steps
    base_ell: fields.Ell
    planner: Annotated[str, fields.choice("exact", "greedy")]
    budget_unit: Annotated[str, fields.choice("steps", "flops")]
    budget: fields.Count
    """In ``steps``, their exact total; in ``flops``, the most one optimizer step may take."""
    min_steps: fields.Steps
    """Fewest steps a group could get, relaxed where the budget needed it."""
    max_steps: fields.Steps
    """Most steps a group could get, relaxed where the budget needed it."""
    costs: tuple[fields.Count, ...] | None
    """Flops of one Newton-Schulz step of all matrices of each group; ``None`` if unknown."""
    curves: tuple[tuple[fields.Float, ...], ...]
    """Projected error of each group at ``min_steps`` to ``max_steps`` steps."""
    allocation: tuple[fields.Steps, ...]
    """Planned steps of each group."""
    objective: fields.Float
    """Summed projected error of the allocation."""

    def schedules(self) -> dict[str, Schedule]:
        """The planned schedule of each group."""
        planned = zip(self.operator_types, self.ell_target, self.allocation, strict=True)
        return {name: composed(ell, steps) for name, ell, steps in planned}

    def state_at(self, progress: Fraction, start: StepsAndElls | None = None) -> StepsAndElls:
        """Steps and effective ``ell`` of each group on the way to the plan.

        Both interpolate linearly in exact arithmetic. The total of steps is rounded half up
        first, then the counts, by largest remainder, so that they sum to it.

        Args:
            progress: In [0, 1]; 0 is the start, 1 the plan.
            start: What the way begins with; the uniform schedule by default.
        """

        def between(first: float, last: float) -> Fraction:
            return Fraction(first) + progress * (Fraction(last) - Fraction(first))

        start = start or dict.fromkeys(self.operator_types, (self.base_steps, self.base_ell))
        first_steps, first_ells = zip(*(start[name] for name in self.operator_types), strict=True)
        steps = _round_to_sum(list(map(between, first_steps, self.allocation)))
        ells = map(float, map(between, first_ells, self.ell_target))
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
        for key in ("ell_robust", "ell_target", "curves", "allocation", "costs"):
            found = getattr(self, key)
            if found is not None and len(found) != num_groups:
                fields.fail(f"{field}.{key}", found, f"one entry for each of {num_groups} groups")

    def table(self) -> str:
        """Lines of text: for each group its ``ell``, its steps before and after, and the flops."""
        width = max(map(len, ("operator type", *self.operator_types)))
        planned = zip(self.operator_types, self.ell_target, self.allocation, strict=True)
        rows = [("operator type", "ell target", "steps before", "after")]
        rows += [(name, f"{ell:.5e}", str(self.base_steps), str(k)) for name, ell, k in planned]
        total = self.base_steps * len(self.operator_types)
        rows.append(("total", "", str(total), str(sum(self.allocation))))
        # Each column is as wide as its title, or as its numbers.
        lines = [
            f"{name:<{width}}  {ell:>11}  {before:>12}  {after:>5}"
            for name, ell, before, after in rows
        ]
        if self.costs is not None:
            more = [steps - self.base_steps for steps in self.allocation]
            spent = list(map(operator.mul, more, self.costs))
            told = ["NS Gflop/step", *(f"{flops / 1e9:+.4g}" for flops in (*spent, sum(spent)))]
            lines = [f"{line}  {flops:>13}" for line, flops in zip(lines, told, strict=True)]
        lines.append(
            f"budget {self.budget} {self.budget_unit}, {self.min_steps} to {self.max_steps} steps "
            f"a type, {self.planner} planner, projected error {self.objective:.5f}"
        )
        return "\n".join(lines)


def composed(ell_effective: float, steps: int) -> Schedule:
    """The schedule AMO runs for an effective ``ell``: composed at ``SAFETY`` times it.

    Args:
        ell_effective: Observed ``ell`` over ``SAFETY``, in (0, 1].
        steps: Number of Newton-Schulz steps.
    """
    return Schedule(compose(_scaled(ell_effective), steps), norm_scale=SAFETY)


def costs_by_group(matrices_by_group: Mapping[str, Sequence[MatrixInfo]]) -> dict[str, int]:
    """Flops of one Newton-Schulz step of all matrices of each group."""
    return {
        group: sum(budgets.ns_step_flops(*matrix.shape) for matrix in matrices)
        for group, matrices in matrices_by_group.items()
    }


def targets(config: AMOConfig, ell_robust: Sequence[float]) -> tuple[float, ...]:
    """``shrinkage * ell + (1 - shrinkage) * base_ell`` for each, rounded once."""
    alpha, base = Fraction(str(config.shrinkage)), Fraction(config.base_ell)
    return tuple(float(alpha * Fraction(ell) + (1 - alpha) * base) for ell in ell_robust)


def plan_inputs(
    config: AMOConfig,
    ell_target_by_type: Mapping[str, float],
    costs: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """The fields of a plan that follow from its inputs without planning.

    Args:
        config: The budget, the range of steps and the planner.
        ell_target_by_type: Target of each group, in (0, 1].
        costs: Flops of one Newton-Schulz step of each group; needed for a budget of flops.

    Raises:
        ValueError: The budget is infeasible, or flops are asked for without costs.
    """
    names = sort_operator_types(ell_target_by_type)
    cost_list = None if costs is None else tuple(costs[name] for name in names)
    ratio, limits = config.budget_ratio, (config.min_steps, config.max_steps)
    if config.budget_unit == "steps":
        total, limited = budgets.step_budget(ratio, len(names), config.base_steps), None
    elif cost_list is None:
        fields.fail("budget_unit", "flops", "the shapes of the matrices of each group with it")
    else:
        total, limited = budgets.flop_budget(ratio, cost_list, config.base_steps), cost_list
    low, high = budgets.relax_range(total, len(names), *limits, costs=limited)
    return {
        "operator_types": names,
        "ell_target": tuple(float(ell_target_by_type[name]) for name in names),
        "base_steps": config.base_steps,
        "base_ell": float(config.base_ell),
        "planner": config.planner,
        "budget_unit": config.budget_unit,
        "budget": total,
        "min_steps": low,
        "max_steps": high,
        "costs": cost_list,
    }


def plan_allocation(
    config: AMOConfig,
    ell_target_by_type: Mapping[str, float],
    *,
    ell_robust: Sequence[float] | None = None,
    costs: Mapping[str, int] | None = None,
) -> Plan:
    """Allocate the budget; a pure function of its arguments, the same bits on every machine.

    Args:
        config: The budget, the range of steps and the planner.
        ell_target_by_type: Target of each group, in (0, 1].
        ell_robust: What was observed, in the order of the plan's groups; the targets by default.
        costs: Flops of one Newton-Schulz step of each group; needed for a budget of flops.

    Raises:
        ValueError: A target is out of range, the budget is infeasible, or costs are missing.
    """
    inputs = plan_inputs(config, ell_target_by_type, costs)
    relaxed = inputs["min_steps"], inputs["max_steps"]
    if relaxed != (config.min_steps, config.max_steps):
        logger.warning(
            "the budget is infeasible within %d to %d steps a type; the range becomes %d to %d",
            *(config.min_steps, config.max_steps, *relaxed),
        )
    ks = range(inputs["min_steps"], inputs["max_steps"] + 1)
    curves = [error_curve(_scaled(ell), ks) for ell in inputs["ell_target"]]
    allocation = budgets.allocate(
        curves,
        inputs["budget"],
        planner=config.planner,
        base_steps=config.base_steps,
        costs=inputs["costs"] if config.budget_unit == "flops" else None,
    )
    return Plan(
        **inputs,
        ell_robust=inputs["ell_target"] if ell_robust is None else tuple(ell_robust),
        curves=tuple(tuple(curve[k] for k in ks) for curve in curves),
        allocation=allocation,
        objective=budgets.objective(curves, allocation),
    )


def _scaled(ell_effective: float) -> float:
    # A single row has ell_raw = 1; dividing and multiplying by SAFETY may end just above it.
    return min(SAFETY * ell_effective, 1.0) if ell_effective <= 1.0 else ell_effective


def _round_to_sum(values: Sequence[Fraction]) -> list[int]:
    """Integers that sum to the rounded sum, by largest remainder; ties to the earlier."""
    counts = [math.floor(value) for value in values]
    by_remainder = sorted(range(len(values)), key=lambda i: (counts[i] - values[i], i))
    for i in by_remainder[: budgets.round_half_up(sum(values, Fraction(0))) - sum(counts)]:
        counts[i] += 1
    return counts
