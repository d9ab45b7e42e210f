"""How a plan is made: from measured errors, or from projected errors as in the AMO paper."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from amo_dist.config import PlanConfig, sort_operator_types
from amo_dist.schedule import budget as budgets
from amo_dist.schedule import fields
from amo_dist.schedule.exact import least_error
from amo_dist.schedule.grouping import Groups
from amo_dist.schedule.plan import Plan
from amo_dist.schedule.polar_express import error_curve, scaled
from amo_dist.schedule.trials import Measured

logger = logging.getLogger(__name__)


def costs_of(groups: Groups) -> dict[str, int]:
    """Flops of one Newton-Schulz step of all matrices of each group."""
    return {
        group: sum(budgets.ns_step_flops(*matrix.shape) for matrix in matrices)
        for group, matrices in groups.members.items()
    }


def targets(config: PlanConfig, ell_robust: Sequence[float]) -> tuple[float, ...]:
    """``shrinkage * ell + (1 - shrinkage) * base_ell`` for each, rounded once."""
    alpha, base = Fraction(str(config.shrinkage)), Fraction(config.base_ell)
    return tuple(float(alpha * Fraction(ell) + (1 - alpha) * base) for ell in ell_robust)


def shares_of(groups: Groups) -> tuple[float, ...]:
    """Share of each group in the whole update's squared norm: see `MatrixInfo.weight`."""
    weights = [math.fsum(m.weight for m in members) for members in groups.members.values()]
    whole = math.fsum(weights)
    return tuple(weight / whole if whole else 1 / len(weights) for weight in weights)


def plan_range(config: PlanConfig) -> tuple[int, int]:
    """Fewest and most steps that a plan by measurements may give a group."""
    low, high, base = config.min_steps, config.max_steps, config.base_steps
    low = min(low, max(math.floor(budgets.exact_ratio(config.budget_ratio) * base), 1))
    if config.budget_ratio >= 1:
        low, high = min(low, base), max(high, base)  # no plan may be worse than uniform
    return low, high


def steps_to_try(config: PlanConfig) -> range:
    """Numbers of steps that are measured: all that a plan by measurements may give."""
    if config.planner == "paper":
        return range(config.min_steps, config.max_steps + 1)
    low, high = plan_range(config)
    return range(low, high + 1)


def plan_inputs(
    config: PlanConfig, groups: Iterable[str], costs: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """The fields of a plan that follow from its inputs without planning.

    Args:
        config: Objective, budget and range of steps.
        groups: Names of the groups of matrices, in any order.
        costs: Flops of one Newton-Schulz step of each group. The paper's plans do without.

    Raises:
        ValueError: The budget is infeasible, or costs are missing.
    """
    names = sort_operator_types(groups)
    known = None if costs is None else tuple(costs[name] for name in names)
    inputs: dict[str, Any] = {
        "operator_types": names,
        "base_steps": config.base_steps,
        "base_ell": float(config.base_ell),
        "costs": known,
    }
    if config.planner == "paper":
        total = budgets.step_budget(config.budget_ratio, len(names), config.base_steps)
        low, high = budgets.relax_range(total, len(names), config.min_steps, config.max_steps)
        inputs |= {"planner": "paper", "budget_unit": "steps", "criterion": "projected"}
    elif known is None:
        fields.fail("costs", None, "the shapes of the matrices of each group")
    else:
        low, high = plan_range(config)
        total = budgets.flop_budget(config.budget_ratio, known, config.base_steps)
        budgets.check_affordable(total, sum(known))
        inputs |= {"planner": "measured", "budget_unit": "flops", "criterion": "update"}
    return inputs | {"budget": total, "min_steps": low, "max_steps": high}


def plan_allocation(
    config: PlanConfig,
    ell_target_by_type: Mapping[str, float],
    *,
    costs: Mapping[str, int] | None = None,
    **kept: Any,
) -> Plan:
    """Plan as the paper does; a pure function of its arguments, the same bits on every machine.

    Args:
        config: Budget and range of steps.
        ell_target_by_type: Target of each group, in (0, 1].
        costs: Flops of one Newton-Schulz step of each group; kept for reports.
        kept: Fields of the plan for reports: ``ell_robust``, the targets by default;
            ``num_matrices``; and ``measured``, of schedules composed for the targets.

    Raises:
        ValueError: A target is out of range, or the budget is infeasible.
    """
    fields.read_choice("planner", config.planner, "paper")
    inputs = plan_inputs(config, ell_target_by_type, costs)
    _tell_relaxed(config, inputs)
    ells = tuple(float(ell_target_by_type[name]) for name in inputs["operator_types"])
    ks = range(inputs["min_steps"], inputs["max_steps"] + 1)
    curves = [error_curve(scaled(ell), ks) for ell in ells]
    allocation = budgets.greedy(curves, inputs["budget"], config.base_steps)
    return Plan(
        **{"ell_robust": ells, **inputs, **kept},
        ell_target=ells,
        curves=tuple(tuple(curve[k] for k in ks) for curve in curves),
        allocation=allocation,
        objective=budgets.objective(curves, allocation),
    )


def plan_measured(
    config: PlanConfig,
    measured_by_group: Mapping[str, Measured],
    *,
    weights: Sequence[float],
    costs: Mapping[str, int],
    **kept: Any,
) -> Plan:
    """Plan by the error of the update: measured distances, weighted by what they stand for.

    Where the budget allows the uniform schedule, the plan's objective is at most that one's. A pure
    function of its arguments, the same bits on every machine.

    Args:
        config: Budget and range of steps.
        measured_by_group: Best schedule of each number of steps of each group.
        weights: Share of each group in the whole update's squared norm, in the order of the plan's
            groups.
        costs: Flops of one Newton-Schulz step of each group.
        kept: Fields of the plan for reports: ``ell_robust`` and ``num_matrices``.

    Raises:
        ValueError: The budget is infeasible.
    """
    fields.read_choice("planner", config.planner, "measured")
    inputs = plan_inputs(config, measured_by_group, costs)
    _tell_relaxed(config, inputs)
    known, low, high = inputs["costs"], inputs["min_steps"], inputs["max_steps"]
    measured = [measured_by_group[name] for name in inputs["operator_types"]]

    curves = [
        {k: weight * spectra.distance(k) for k in range(low, high + 1)}
        for spectra, weight in zip(measured, weights, strict=True)
    ]
    allocation = least_error(curves, inputs["budget"], known)
    plan = Plan(
        **inputs,
        **kept,
        ell_target=tuple(spectra.ell(k) for spectra, k in zip(measured, allocation, strict=True)),
        curves=tuple(
            tuple(spectra.distance(k) for k in range(low, high + 1)) for spectra in measured
        ),
        allocation=allocation,
        objective=budgets.objective(curves, allocation),
        weights=tuple(weights),
        measured=tuple(measured),
    )
    assert config.budget_ratio < 1 or plan.objective <= plan.uniform_objective
    return plan


def _tell_relaxed(config: PlanConfig, inputs: Mapping[str, Any]) -> None:
    asked = config.min_steps, config.max_steps
    relaxed = inputs["min_steps"], inputs["max_steps"]
    if relaxed != asked:
        why = "the budget is infeasible within"
        if config.planner == "measured" and relaxed[1] > config.max_steps:
            why = f"the {config.base_steps} steps of the uniform schedule are beyond"
        logger.warning(
            "%s %d to %d steps per type; the range becomes %d to %d", why, *asked, *relaxed
        )
