"""Newton-Schulz steps of each operator type over a run, as far as they are known before it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from amo_dist.config import AMOConfig, sort_operator_types
from amo_dist.optimizers import root
from amo_dist.optimizers.named import MUON_SCHEDULES
from amo_dist.schedule.grouping import group_matrices
from amo_dist.schedule.plan import Plan
from amo_dist.schedule.planning import costs_of, plan_measured, steps_to_try
from amo_dist.schedule.policies import as_policy
from amo_dist.schedule.trials import Measured
from amo_dist.schedule.types import MatrixInfo
from amo_dist.tools.command import read_steps
from torchtitan_ext.config.schedule_file import load_schedule_file
from torchtitan_ext.tools.shapes import PLANS

Steps = dict[str, int]
"""Steps by operator type, in the declared order."""

TYPICAL_ERRORS = (1.02, 0.705, 0.376, 0.135, 0.0297, 0.0073, 0.0023)
"""Squared error of the direction after one step and more, each with its best ``ell``: mean of three
small models in ``benchmarks/plan_quality``, each matrix weighted by its entries."""
TYPICAL_UNIFORM = 0.033
"""The same after five uniform steps."""

_LADDER_ROWS, _LADDER_POINTS = 8, 1000


def steps(config: Any, registry: Sequence[MatrixInfo], plan: str) -> tuple[Steps, Steps, str]:
    """Newton-Schulz steps before and after the lock, and the origin of the latter.

    Args:
        config: A checked config.
        registry: Every matrix.
        plan: Steps after the lock as ``TYPE=STEPS,...``; empty for the default.

    Raises:
        ValueError: For a malformed plan, or a schedule file that lacks an operator type.
    """
    types = sort_operator_types(info.operator_type for info in registry)
    if not types:
        return {}, {}, "no matrices"
    if config.optimizer.name != "AMO":
        fixed, origin = _fixed(config.optimizer, registry)
        return fixed, fixed, f"{origin}, the same all along"
    before = dict.fromkeys(types, config.optimizer.amo.base_steps)
    if plan:
        return before, {**before, **read_steps("--plan", plan.split(","), types)}, "given by --plan"
    known = PLANS.get(config.model.flavor, ()) if config.optimizer.amo.planner == "paper" else ()
    if len(types) == len(known):
        return before, dict(zip(types, known, strict=True)), "the paper's for this model"
    return before, before, "the plan comes during the run; uniform is shown"


def ladder(config: Any, registry: Sequence[MatrixInfo]) -> dict[str, Any] | None:
    """The ladder under the config's schedule of rates, for typical errors of the direction.

    Args:
        config: A checked config.
        registry: Every matrix.

    Returns:
        Rates, steps and flops over the run, and flops of the whole run; None without a ladder.
    """
    if config.optimizer.name != "AMO" or not registry:
        return None
    amo, last = config.optimizer.amo, config.training.steps
    if not amo.has_ladder or amo.observe_only or last <= amo.lock_step:
        return None
    plan, rate_at = _typical_plan(amo, registry), rates(config)
    assert plan.flops_ratio is not None
    peak = max(rate_at(step) for step in _spread(1, amo.observe_until, _LADDER_POINTS))
    steps_after = _spread(amo.lock_step + 1, last, _LADDER_POINTS)
    spent = [plan.flops_ratio_of(plan.steps_at(rate_at(s), peak)) or 0.0 for s in steps_after]
    after = math.fsum(spent) / len(spent)
    glide = amo.transition_steps * (1 + plan.flops_ratio) / 2
    whole = amo.observe_until + glide + (last - amo.lock_step) * after
    rows = []
    for step in _spread(amo.lock_step + 1, last, _LADDER_ROWS):
        steps_by_group = plan.steps_at(rate_at(step), peak)
        rows.append(
            {
                "step": step,
                "rate": rate_at(step) / peak if peak else 0.0,
                "steps": dict(zip(plan.operator_types, steps_by_group, strict=True)),
                "flops": plan.flops_ratio_of(steps_by_group),
            }
        )
    return {"tau": amo.ladder_tau, "rows": rows, "flops_after": after, "flops": whole / last}


def rates(config: Any) -> Callable[[int], float]:
    """Learning rate at an optimizer step, in peak rates, as torchtitan computes it."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedule = config.lr_scheduler.build(
        optimizers=[optimizer], training_steps=config.training.steps
    )
    factor: Callable[[int], float] = schedule.schedulers[0].lr_lambdas[0]
    return lambda step: float(factor(step - 1))


def _typical_plan(amo: AMOConfig, registry: Sequence[MatrixInfo]) -> Plan:
    """The plan and ladder of matrices that are all typical, weighted by their entries."""
    groups = group_matrices(registry, amo.granularity)
    tried, most = steps_to_try(amo), len(TYPICAL_ERRORS)
    # Each further step leaves about a third.
    errors = [TYPICAL_ERRORS[min(k, most) - 1] / 3 ** max(k - most, 0) for k in tried]
    uniform = TYPICAL_UNIFORM if amo.base_steps == 5 else errors[amo.base_steps - tried[0]]
    sizes = [sum(m.shape[0] * m.shape[1] for m in members) for members in groups.members.values()]
    distances, ells = tuple(errors), (amo.base_ell,) * len(errors)
    typical = Measured(tried[0], ells, distances, distances, uniform, uniform)
    return plan_measured(
        amo,
        dict.fromkeys(groups.members, typical),
        weights=[size / sum(sizes) for size in sizes],
        costs=costs_of(groups),
        ell_robust=(amo.base_ell,) * len(sizes),
        num_matrices=tuple(map(len, groups.members.values())),
    )


def _spread(first: int, last: int, most: int) -> list[int]:
    """At most so many steps from the first to the last, evenly."""
    count = min(most, last - first + 1)
    return [first + i * (last - first) // max(count - 1, 1) for i in range(count)]


def _fixed(optimizer: Any, registry: Sequence[MatrixInfo]) -> tuple[Steps, str]:
    """The steps of an optimizer that plans nothing, and their origin."""
    name = optimizer.name
    if name == "ROOT":
        # Its triples are fitted before the first step; how often they are repeated is known now.
        types = sort_operator_types(info.operator_type for info in registry)
        return dict.fromkeys(types, root.NUM_STEPS), "ROOT's triples, fitted to each shape"
    # Only Muon is given a schedule; AdaMuon orthogonalizes as Muon does where it is given none.
    path, schedule = optimizer.muon.schedule_file, optimizer.muon.schedule
    schedule = schedule or MUON_SCHEDULES.get(name, MUON_SCHEDULES["Muon"])
    policy = as_policy(load_schedule_file(path) if path else schedule)
    origin = f"schedule file {path}" if path else f"schedule {schedule}"
    origin += "" if name == "Muon" else f" of {name}"
    schedules = policy.schedules(policy.start(), policy.groups(registry), 1)
    return {group: schedule.num_steps for group, schedule in schedules.items()}, origin
