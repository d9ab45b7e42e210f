"""Newton-Schulz steps of each operator type over a run, as far as they are known before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amo_dist.config import sort_operator_types
from amo_dist.optimizers import root
from amo_dist.optimizers.named import MUON_SCHEDULES
from amo_dist.schedule.policies import as_policy
from amo_dist.schedule.types import MatrixInfo
from torchtitan_ext.config.schedule_file import load_schedule_file
from torchtitan_ext.tools.command import read_steps
from torchtitan_ext.tools.shapes import PLANS

Steps = dict[str, int]
"""Steps by operator type, in the declared order."""


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
