"""What a plan gains over a range of budgets, and the least that is enough."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from amo_dist.config import AMOConfig
from amo_dist.schedule.plan import Plan
from amo_dist.tools.command import pad
from amo_dist.tools.plan_source import Source

_STEP = "0.05"
_MOST = 1000
"""Ratios that one sweep may try."""
_UNKNOWN = "-"


def read_sweep(text: str) -> list[float]:
    """The budget ratios of a range.

    Args:
        text: ``LOW:HIGH`` or ``LOW:HIGH:STEP``; both ends are in the range where steps lead there.

    Raises:
        ValueError: The text is not of this form, or there are too many ratios.
    """
    try:
        values = [float(part) for part in [*text.split(":"), _STEP][:3]]
    except ValueError:
        values = []
    is_range = text.count(":") in (1, 2) and len(values) == 3
    if not (is_range and all(0 < x < math.inf for x in values) and values[0] <= values[1]):
        raise ValueError(
            f"--sweep: found {text!r}, expected LOW:HIGH or LOW:HIGH:STEP, numbers > 0 with "
            "LOW <= HIGH, e.g. 0.7:1.2:0.05"
        )
    # Exact, as they were written: 0.7 and eight times 0.05 are 1.1.
    low, high, step = (Fraction(str(value)) for value in values)
    count = (high - low) // step + 1
    if count > _MOST:
        raise ValueError(f"--sweep: found {text!r}, expected at most {_MOST} ratios")
    return [float(low + i * step) for i in range(count)]


def sweep(source: Source, config: AMOConfig, ratios: Sequence[float]) -> list[Plan]:
    """The plan at each budget ratio.

    Raises:
        ValueError: A ratio is infeasible; the message names it.
    """
    plans = []
    for ratio in ratios:
        try:
            plans.append(source.plan(dataclasses.replace(config, budget_ratio=ratio)))
        except ValueError as error:
            raise ValueError(f"--sweep: at a ratio of {ratio}: {error}") from None
    return plans


def least_ratio(ratios: Sequence[float], plans: Sequence[Plan]) -> float | None:
    """The least ratio at which the plan is no worse than uniform; None where there is none."""
    pairs = zip(ratios, plans, strict=True)
    return next((ratio for ratio, plan in pairs if plan.objective <= plan.uniform_objective), None)


def sweep_table(ratios: Sequence[float], plans: Sequence[Plan]) -> str:
    """Lines of text: a row for each ratio, and which is the least that is enough."""
    first = plans[0]
    is_known = first.flops_ratio is not None
    steps = first.base_steps * len(first.operator_types)
    rows = [
        ("budget ratio", "objective", "of uniform's", "steps", "flops of uniform's"),
        (
            *("uniform", f"{first.uniform_objective:.5f}", _share(1.0), f"{steps}"),
            _share(1.0 if is_known else None),
        ),
    ]
    rows += [
        (
            *(f"{ratio:g}", f"{plan.objective:.5f}", _share(_gain(plan))),
            *(f"{sum(plan.allocation)}", _share(plan.flops_ratio)),
        )
        for ratio, plan in zip(ratios, plans, strict=True)
    ]
    unit = f"budgets of {first.budget_unit}, {first.planner} planner, {first.criterion} objective"
    lines = ["  ".join(row).rstrip() for row in pad(rows, left=[0])]
    return "\n".join([*lines, unit, _verdict(ratios, plans)])


def sweep_json(ratios: Sequence[float], plans: Sequence[Plan]) -> dict[str, Any]:
    """What `sweep_table` shows, for other programs."""
    first = plans[0]
    return {
        "criterion": first.criterion,
        "planner": first.planner,
        "budget_unit": first.budget_unit,
        "uniform_objective": first.uniform_objective,
        "uniform_steps": first.base_steps * len(first.operator_types),
        "sweep": [
            {
                "budget_ratio": ratio,
                "objective": plan.objective,
                "objective_ratio": _gain(plan),
                "steps": sum(plan.allocation),
                "flops_ratio": plan.flops_ratio,
                "allocation": dict(zip(plan.operator_types, plan.allocation, strict=True)),
            }
            for ratio, plan in zip(ratios, plans, strict=True)
        ],
        "least_budget_ratio": least_ratio(ratios, plans),
    }


def _verdict(ratios: Sequence[float], plans: Sequence[Plan]) -> str:
    least = least_ratio(ratios, plans)
    if least is None:
        return f"no ratio from {ratios[0]:g} to {ratios[-1]:g} gives a plan as good as uniform"
    return f"the least ratio whose plan is no worse than uniform: {least:g}"


def _gain(plan: Plan) -> float | None:
    """The objective over uniform's."""
    return plan.objective / plan.uniform_objective if plan.uniform_objective else None


def _share(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:.4f}"
