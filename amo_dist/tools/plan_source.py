"""What the command ``plan`` plans from: targets that it is given, or what a run's plan holds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from amo_dist.config import AMOConfig
from amo_dist.schedule import budget as budgets
from amo_dist.schedule.plan import Plan
from amo_dist.schedule.planning import plan_allocation, plan_inputs, plan_measured
from amo_dist.schedule.trials import Measured

PLAN_FILE = "plan.json"
"""In a run's folder, where AMO has planned."""


class Source(Protocol):
    """What can be planned from, under one set of settings or another."""

    @property
    def settings(self) -> AMOConfig:
        """Those in force where no option says otherwise."""

    def plan(self, config: AMOConfig) -> Plan:
        """The plan under some settings.

        Raises:
            ValueError: The budget is infeasible, or what it needs is not known.
        """


@dataclasses.dataclass(frozen=True, slots=True)
class Targets:
    """Targets of operator types: planned as in the AMO paper."""

    ells: Mapping[str, float]
    """By operator type."""
    costs: Mapping[str, int] | None
    """Flops of one Newton-Schulz step of each type."""

    @property
    def settings(self) -> AMOConfig:
        """The paper's."""
        return AMOConfig.paper()

    def plan(self, config: AMOConfig) -> Plan:
        """See `Source.plan`."""
        return plan_allocation(config, self.ells, costs=self.costs)


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """The plan of a run, which holds what it was made of."""

    found: Plan

    @property
    def settings(self) -> AMOConfig:
        """Those with which the plan was made."""
        plan = self.found
        return AMOConfig(
            objective=plan.criterion,
            base_steps=plan.base_steps,
            base_ell=plan.base_ell,
            budget_ratio=_budget_ratio(plan),
            min_steps=plan.min_steps,
            max_steps=plan.max_steps,
            planner=plan.planner,
            budget_unit=plan.budget_unit,
        )

    def plan(self, config: AMOConfig) -> Plan:
        """See `Source.plan`; only with the numbers of steps that were measured."""
        found, names = self.found, self.found.operator_types
        costs = None if found.costs is None else dict(zip(names, found.costs, strict=True))
        measured = self._measured(plan_inputs(config, names, costs))
        if found.criterion == "projected":
            return plan_allocation(
                config,
                dict(zip(names, found.ell_target, strict=True)),
                ell_robust=found.ell_robust,
                costs=costs,
                num_matrices=found.num_matrices,
                measured=measured,
            )
        assert measured is not None
        assert found.num_matrices is not None
        return plan_measured(
            config,
            dict(zip(names, measured, strict=True)),
            num_matrices=dict(zip(names, found.num_matrices, strict=True)),
            ell_robust=found.ell_robust,
            costs=costs,
        )

    def _measured(self, inputs: Mapping[str, Any]) -> list[Measured] | None:
        """What was measured, of the numbers of steps that a plan may give."""
        plan, low, high = self.found, inputs["min_steps"], inputs["max_steps"]
        if plan.measured is None:
            return None
        if low < plan.min_steps or high > plan.max_steps:
            raise ValueError(
                f"--plan: found measurements of {plan.min_steps} to {plan.max_steps} steps, "
                f"expected {low} to {high}, which --min-steps, --max-steps or a budget of "
                f"{inputs['budget']} {inputs['budget_unit']} need"
            )
        some = slice(low - plan.min_steps, high - plan.min_steps + 1)
        return [
            dataclasses.replace(
                one, **{key: getattr(one, key)[some] for key in ("ells", "residuals", "distances")}
            )
            for one in plan.measured
        ]


def read_plan(text: str) -> Plan:
    """The plan of a run.

    Args:
        text: Path of its file, or of the run's folder.

    Raises:
        ValueError: There is none, or the file is malformed.
    """
    path = Path(text)
    path = path / PLAN_FILE if path.is_dir() else path
    try:
        plan = Plan.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"--plan: {path}: {error.strerror}; expected the file {PLAN_FILE} of a run, which is "
            "there once AMO has planned, or the run's folder"
        ) from None
    except ValueError as error:
        raise ValueError(f"--plan: {path}: {error}") from None
    if not plan.operator_types:
        raise ValueError(f"--plan: {path}: found no operator type, expected at least one")
    return plan


def _budget_ratio(plan: Plan) -> float:
    """The ratio of a plan's budget to the uniform schedule's work, never below it."""
    if plan.budget_unit == "steps" or plan.costs is None:
        return plan.budget / (plan.base_steps * len(plan.operator_types))
    ratio = plan.budget / (plan.base_steps * sum(plan.costs))
    # Rounded down, the ratio would give a flop less.
    if budgets.flop_budget(ratio, plan.costs, plan.base_steps) < plan.budget:
        ratio = math.nextafter(ratio, math.inf)
    return ratio
