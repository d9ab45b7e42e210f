"""The plan: how many Newton-Schulz steps each operator type gets, for which ``ell``, and why."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeAlias

from amo_dist.config import AMOConfig, sort_operator_types
from amo_dist.schedule import budget as budgets
from amo_dist.schedule import fields
from amo_dist.schedule.budget import ns_step_flops, round_half_up
from amo_dist.schedule.polar_express import SAFETY, compose, error_curve
from amo_dist.schedule.types import MatrixInfo, Schedule

logger = logging.getLogger(__name__)

State: TypeAlias = Mapping[str, tuple[int, float]]
"""Newton-Schulz steps and effective ``ell`` of each operator type."""


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What AMO commits to. Sequences are in the order of ``operator_types``.

    It is complete in itself: every schedule from the plan on follows from it alone.
    """

    operator_types: tuple[str, ...]
    ell_robust: tuple[float, ...]
    """Observed effective ``ell``: the median over observations of their medians."""
    ell_target: tuple[float, ...]
    """``ell_robust`` shrunk toward ``base_ell``; composed for at ``SAFETY`` times this."""
    base_steps: int
    base_ell: float
    planner: str
    budget_unit: str
    budget: int
    """In ``steps``, their exact total; in ``flops``, the most one optimizer step may take."""
    min_steps: int
    """Fewest steps a type could get, relaxed where the budget needed it."""
    max_steps: int
    """Most steps a type could get, relaxed where the budget needed it."""
    costs: tuple[int, ...] | None
    """Flops of one Newton-Schulz step of all matrices of each type; ``None`` if unknown."""
    curves: tuple[tuple[float, ...], ...]
    """Projected error of each type at ``min_steps`` to ``max_steps`` steps."""
    allocation: tuple[int, ...]
    """Planned steps of each type."""
    objective: float
    """Summed projected error of the allocation."""

    def schedules(self) -> dict[str, Schedule]:
        """The planned schedule of each operator type."""
        planned = zip(self.operator_types, self.ell_target, self.allocation, strict=True)
        return {name: composed(ell, steps) for name, ell, steps in planned}

    def state_at(
        self, progress: Fraction, start: State | None = None
    ) -> dict[str, tuple[int, float]]:
        """Steps and effective ``ell`` of each type on the way to the plan.

        Both interpolate linearly in exact arithmetic. The total of steps is rounded half up
        first, then the counts, by largest remainder, so that they sum to it.

        Args:
            progress: In [0, 1]; 0 is the start, 1 the plan.
            start: What the way begins with; the uniform schedule by default.
        """
        if start is None:
            start = dict.fromkeys(self.operator_types, (self.base_steps, self.base_ell))
        steps: list[Fraction] = []
        ells: list[float] = []
        for name, target, planned in zip(
            self.operator_types, self.ell_target, self.allocation, strict=True
        ):
            first_steps, first_ell = start[name]
            steps.append(first_steps + progress * (planned - first_steps))
            ells.append(
                float(Fraction(first_ell) + progress * (Fraction(target) - Fraction(first_ell)))
            )
        counts = zip(_round_to_sum(steps), ells, strict=True)
        return dict(zip(self.operator_types, counts, strict=True))

    def to_json(self) -> str:
        """Text from which ``from_json`` restores the plan bit for bit."""
        return json.dumps(self.to_dict(), sort_keys=True)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values, floats as ``float.hex()``."""
        return {
            "operator_types": list(self.operator_types),
            "ell_robust": [fields.write_float(ell) for ell in self.ell_robust],
            "ell_target": [fields.write_float(ell) for ell in self.ell_target],
            "base_steps": self.base_steps,
            "base_ell": fields.write_float(self.base_ell),
            "planner": self.planner,
            "budget_unit": self.budget_unit,
            "budget": self.budget,
            "min_steps": self.min_steps,
            "max_steps": self.max_steps,
            "costs": None if self.costs is None else list(self.costs),
            "curves": [[fields.write_float(error) for error in curve] for curve in self.curves],
            "allocation": list(self.allocation),
            "objective": fields.write_float(self.objective),
        }

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read and validate what ``to_json`` wrote.

        Raises:
            ValueError: The text is not JSON, or a field is missing, unknown, malformed or at odds
                with another; the message names it.
        """
        return cls.from_dict(fields.read_json("plan", text))

    @classmethod
    def from_dict(cls, found: object, field: str = "plan") -> Plan:
        """Read and validate what ``to_dict`` wrote; ``field`` names it in errors.

        Raises:
            ValueError: As for ``from_json``.
        """
        keys = [f.name for f in dataclasses.fields(cls)]
        record = fields.read_record(field, found, keys)
        values: dict[str, Any] = {key: _read(key, f"{field}.{key}", record[key]) for key in keys}
        plan = cls(**values)
        plan._check(field)
        return plan

    def _check(self, field: str) -> None:
        """Refuse a plan whose fields contradict one another."""
        num_types = len(self.operator_types)
        ordered = sort_operator_types(self.operator_types)
        if self.operator_types != ordered:
            fields.fail(f"{field}.operator_types", self.operator_types, f"the order {ordered}")
        for key in ("ell_robust", "ell_target", "curves", "allocation", "costs"):
            found = getattr(self, key)
            if found is not None and len(found) != num_types:
                fields.fail(f"{field}.{key}", found, f"one entry for each of {num_types} types")
        if self.budget_unit == "flops" and (self.costs is None or self.planner == "greedy"):
            fields.fail(f"{field}.budget_unit", "flops", "costs, and the exact planner, with it")
        self._check_allocation(field)

    def _check_allocation(self, field: str) -> None:
        low, high = self.min_steps, self.max_steps
        if high < low:
            fields.fail(f"{field}.max_steps", high, f"an integer >= min_steps = {low}")
        if any(len(curve) != high - low + 1 for curve in self.curves):
            fields.fail(f"{field}.curves", self.curves, f"errors at {low} to {high} steps")
        if not all(low <= steps <= high for steps in self.allocation):
            fields.fail(f"{field}.allocation", self.allocation, f"steps from {low} to {high}")
        if self.budget_unit == "steps" and sum(self.allocation) != self.budget:
            fields.fail(f"{field}.allocation", self.allocation, f"a sum of {self.budget}")
        if self.budget_unit == "flops" and _dot(self.allocation, self.costs or ()) > self.budget:
            fields.fail(f"{field}.allocation", self.allocation, f"at most {self.budget} flops")
        if self.objective != self._summed_error():
            fields.fail(f"{field}.objective", self.objective, f"{self._summed_error()!r}")

    def _summed_error(self) -> float:
        chosen = zip(self.curves, self.allocation, strict=True)
        return math.fsum(curve[steps - self.min_steps] for curve, steps in chosen)

    def table(self) -> str:
        """Lines of text: for each type its ``ell``, its steps before and after, and the flops."""
        heads = ["operator type", "ell target", "steps before", "after"]
        rows = [
            [name, f"{ell:.5e}", str(self.base_steps), str(steps)]
            for name, ell, steps in zip(
                self.operator_types, self.ell_target, self.allocation, strict=True
            )
        ]
        num_types = len(rows)
        rows.append(["total", "", str(num_types * self.base_steps), str(sum(self.allocation))])
        if self.costs is not None:
            heads.append("NS Gflop/step")
            spent = [
                (steps - self.base_steps) * cost
                for steps, cost in zip(self.allocation, self.costs, strict=True)
            ]
            for row, flops in zip(rows, [*spent, sum(spent)], strict=True):
                row.append(f"{flops / 1e9:+.4g}")
        return "\n".join([*_aligned([heads, *rows]), self._summary()])

    def _summary(self) -> str:
        return (
            f"budget {self.budget} {self.budget_unit}, {self.min_steps} to {self.max_steps} steps "
            f"a type, {self.planner} planner, projected error {self.objective:.5f}"
        )


def composed(ell_effective: float, steps: int) -> Schedule:
    """The schedule AMO runs for an effective ``ell``: composed at ``SAFETY`` times it.

    Args:
        ell_effective: Observed ``ell`` over ``SAFETY``, in (0, 1].
        steps: Number of Newton-Schulz steps.
    """
    return Schedule(compose(_scaled(ell_effective), steps), norm_scale=SAFETY)


def costs_by_type(registry: Sequence[MatrixInfo]) -> dict[str, int]:
    """Flops of one Newton-Schulz step of all matrices of each operator type."""
    costs = dict.fromkeys(sort_operator_types(m.operator_type for m in registry), 0)
    for matrix in registry:
        costs[matrix.operator_type] += ns_step_flops(*matrix.shape)
    return costs


def targets(config: AMOConfig, ell_robust: Sequence[float]) -> tuple[float, ...]:
    """``shrinkage * ell + (1 - shrinkage) * base_ell`` for each, rounded once."""
    alpha, base = Fraction(str(config.shrinkage)), Fraction(config.base_ell)
    return tuple(float(alpha * Fraction(ell) + (1 - alpha) * base) for ell in ell_robust)


def frame(
    config: AMOConfig,
    ell_target_by_type: Mapping[str, float],
    costs: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """The fields of a plan that follow from its inputs without planning.

    Args:
        config: The budget, the range of steps and the planner.
        ell_target_by_type: Target of each operator type, in (0, 1].
        costs: Flops of one Newton-Schulz step of each type; needed for a budget of flops.

    Raises:
        ValueError: The budget is infeasible, or flops are asked for without costs.
    """
    names = sort_operator_types(ell_target_by_type)
    cost_list = None if costs is None else tuple(costs[name] for name in names)
    by_flops = config.budget_unit == "flops"
    if by_flops:
        if cost_list is None:
            fields.fail("budget_unit", "flops", "the shapes of the matrices of each type with it")
        total = budgets.flop_budget(config.budget_ratio, cost_list, config.base_steps)
    else:
        total = budgets.step_budget(config.budget_ratio, len(names), config.base_steps)
    low, high = budgets.relax_range(
        *(total, len(names), config.min_steps, config.max_steps),
        costs=cost_list if by_flops else None,
    )
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


def make_plan(
    config: AMOConfig,
    ell_target_by_type: Mapping[str, float],
    *,
    ell_robust: Sequence[float] | None = None,
    costs: Mapping[str, int] | None = None,
) -> Plan:
    """Allocate the budget; a pure function of its arguments, the same bits on every machine.

    Args:
        config: The budget, the range of steps and the planner.
        ell_target_by_type: Target of each operator type, in (0, 1].
        ell_robust: What was observed, in the order of the plan's types; the targets by default.
        costs: Flops of one Newton-Schulz step of each type; needed for a budget of flops.

    Raises:
        ValueError: A target is out of range, the budget is infeasible, or costs are missing.
    """
    framed = frame(config, ell_target_by_type, costs)
    relaxed = framed["min_steps"], framed["max_steps"]
    if relaxed != (config.min_steps, config.max_steps):
        logger.warning(
            "the budget is infeasible within %d to %d steps a type; the range becomes %d to %d",
            *(config.min_steps, config.max_steps, *relaxed),
        )
    ks = range(framed["min_steps"], framed["max_steps"] + 1)
    curves = [error_curve(_scaled(ell), ks) for ell in framed["ell_target"]]
    allocation = budgets.allocate(
        curves,
        framed["budget"],
        planner=config.planner,
        base_steps=config.base_steps,
        costs=framed["costs"] if config.budget_unit == "flops" else None,
    )
    return Plan(
        **framed,
        ell_robust=framed["ell_target"] if ell_robust is None else tuple(ell_robust),
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
    for i in by_remainder[: round_half_up(sum(values, Fraction(0))) - sum(counts)]:
        counts[i] += 1
    return counts


def _read(key: str, field: str, found: object) -> Any:
    """One field of a plan from its JSON value."""
    if key == "operator_types":
        return fields.read_names(field, found)
    if key in ("ell_robust", "ell_target"):
        return tuple(fields.read_ell(field, ell) for ell in fields.read_list(field, found))
    if key == "base_ell":
        return fields.read_ell(field, found)
    if key == "objective":
        return fields.read_float(field, found)
    if key == "planner":
        return fields.read_choice(field, found, ("exact", "greedy"))
    if key == "budget_unit":
        return fields.read_choice(field, found, ("steps", "flops"))
    if key == "curves":
        rows = [fields.read_list(field, row) for row in fields.read_list(field, found)]
        return tuple(tuple(fields.read_error(field, error) for error in row) for row in rows)
    if key == "costs" and found is None:
        return None
    if key in ("costs", "allocation"):
        return tuple(fields.read_int(field, n, 1) for n in fields.read_list(field, found))
    return fields.read_int(field, found, 1)


def _dot(xs: Sequence[int], ys: Sequence[int]) -> int:
    return sum(x * y for x, y in zip(xs, ys, strict=True))


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines, the first column to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
