"""How a plan is made: from measured residuals, or from projected errors as in the AMO paper."""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from amo_dist.config import AMOConfig, sort_operator_types
from amo_dist.schedule import budget as budgets
from amo_dist.schedule import fields
from amo_dist.schedule.exact import least_error
from amo_dist.schedule.plan import Plan
from amo_dist.schedule.polar_express import error_curve, scaled
from amo_dist.schedule.trials import Measured
from amo_dist.schedule.types import MatrixInfo

logger = logging.getLogger(__name__)


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
    config: AMOConfig, groups: Sequence[str], costs: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """The fields of a plan that follow from its inputs without planning.

    Args:
        config: The objective, the budget, the range of steps and the planner.
        groups: Which groups of matrices there are, in any order.
        costs: Flops of one Newton-Schulz step of each group; needed for a budget of flops.

    Raises:
        ValueError: The budget is infeasible, or flops are asked for without costs.
    """
    names, is_measured = sort_operator_types(groups), config.objective == "measured"
    known = None if costs is None else tuple(costs[name] for name in names)
    ratio, base, limited = config.budget_ratio, config.base_steps, known
    if config.budget_unit == "steps":
        total = budgets.step_budget(ratio, len(names), base)
        # As a ceiling a budget of steps is one of flops at unit costs.
        limited = (1,) * len(names) if is_measured else None
    elif known is None:
        fields.fail("budget_unit", "flops", "the shapes of the matrices of each group with it")
    else:
        total = budgets.flop_budget(ratio, known, base)
    asked = config.min_steps, config.max_steps
    low, high = budgets.relax_range(total, len(names), *asked, costs=limited)
    if is_measured and ratio >= 1:
        low, high = min(low, base), max(high, base)  # no plan may be worse than uniform
    return {
        "operator_types": names,
        "base_steps": base,
        "base_ell": float(config.base_ell),
        "planner": config.planner,
        "budget_unit": config.budget_unit,
        "budget": total,
        "min_steps": low,
        "max_steps": high,
        "costs": known,
        "criterion": config.objective,
    }


def plan_allocation(
    config: AMOConfig,
    ell_target_by_type: Mapping[str, float],
    *,
    ell_robust: Sequence[float] | None = None,
    costs: Mapping[str, int] | None = None,
    num_matrices: Sequence[int] | None = None,
    measured: Sequence[Measured] | None = None,
) -> Plan:
    """Plan by projected errors; a pure function of its arguments, the same bits on every machine.

    Args:
        config: The budget, the range of steps and the planner.
        ell_target_by_type: Target of each group, in (0, 1].
        ell_robust: What was observed, in the order of the plan's groups; the targets by default.
        costs: Flops of one Newton-Schulz step of each group; needed for a budget of flops.
        num_matrices: Of each group, in the order of the plan's; kept for reports.
        measured: Of schedules composed for the targets; kept for reports.

    Raises:
        ValueError: A target is out of range, the budget is infeasible, or costs are missing.
    """
    inputs = plan_inputs(config, tuple(ell_target_by_type), costs)
    fields.read_choice("objective", config.objective, "projected")
    _tell_relaxed(config, inputs)
    ells = tuple(float(ell_target_by_type[name]) for name in inputs["operator_types"])
    ks = range(inputs["min_steps"], inputs["max_steps"] + 1)
    curves = [error_curve(scaled(ell), ks) for ell in ells]
    allocation = budgets.allocate(
        curves,
        inputs["budget"],
        planner=config.planner,
        base_steps=config.base_steps,
        costs=inputs["costs"] if config.budget_unit == "flops" else None,
    )
    return Plan(
        **inputs,
        ell_robust=ells if ell_robust is None else tuple(ell_robust),
        ell_target=ells,
        curves=tuple(tuple(curve[k] for k in ks) for curve in curves),
        allocation=allocation,
        objective=budgets.objective(curves, allocation),
        num_matrices=None if num_matrices is None else tuple(num_matrices),
        measured=None if measured is None else tuple(measured),
    )


def plan_measured(
    config: AMOConfig,
    measured_by_group: Mapping[str, Measured],
    *,
    num_matrices: Mapping[str, int],
    ell_robust: Sequence[float],
    costs: Mapping[str, int] | None = None,
) -> Plan:
    """Plan by measured residuals, each weighted by the matrices that it stands for.

    Where the budget allows the uniform schedule, the plan's objective is at most that one's. A pure
    function of its arguments, the same bits on every machine.

    Args:
        config: The budget and the range of steps.
        measured_by_group: The best schedule of each number of steps that a group may get.
        num_matrices: Of each group.
        ell_robust: What was observed, in the order of the plan's groups; for reports.
        costs: Flops of one Newton-Schulz step of each group; needed for a budget of flops.

    Raises:
        ValueError: The budget is infeasible, or costs are missing.
    """
    inputs = plan_inputs(config, tuple(measured_by_group), costs)
    fields.read_choice("objective", config.objective, "measured")
    _tell_relaxed(config, inputs)
    names, low = inputs["operator_types"], inputs["min_steps"]
    measured = [measured_by_group[name] for name in names]
    weights = [num_matrices[name] for name in names]
    curves = [
        dict(enumerate((weight * residual for residual in one.residuals), start=low))
        for one, weight in zip(measured, weights, strict=True)
    ]
    units = inputs["costs"] if config.budget_unit == "flops" else (1,) * len(names)
    allocation = least_error(curves, inputs["budget"], units)
    uniform = (config.base_steps,) * len(names)
    # Hundreds of groups under flops can be too many for the least error.
    is_affordable = sum(map(operator.mul, uniform, units)) <= inputs["budget"]
    if is_affordable and low <= config.base_steps <= inputs["max_steps"]:
        allocation = min(allocation, uniform, key=lambda one: budgets.objective(curves, one))
    plan = Plan(
        **inputs,
        ell_robust=tuple(ell_robust),
        ell_target=tuple(
            one.ells[steps - low] for one, steps in zip(measured, allocation, strict=True)
        ),
        curves=tuple(one.residuals for one in measured),
        allocation=allocation,
        objective=budgets.objective(curves, allocation),
        num_matrices=tuple(weights),
        measured=tuple(measured),
    )
    assert not is_affordable or config.budget_ratio < 1 or plan.objective <= plan.uniform_objective
    return plan


def _tell_relaxed(config: AMOConfig, inputs: Mapping[str, Any]) -> None:
    asked, relaxed = (
        (config.min_steps, config.max_steps),
        (inputs["min_steps"], inputs["max_steps"]),
    )
    if relaxed != asked:
        why = "the budget is infeasible within"
        if config.objective == "measured" and relaxed[1] > config.max_steps:
            why = f"the {config.base_steps} steps of the uniform schedule are beyond"
        logger.warning(
            "%s %d to %d steps a type; the range becomes %d to %d", why, *asked, *relaxed
        )
