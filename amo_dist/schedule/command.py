"""Command ``plan``: Newton-Schulz steps by operator type, and what they gain over uniform steps."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from amo_dist.config import AMOConfig, require
from amo_dist.schedule.plan import (
    PLAN_FILE,
    ErrorCurve,
    Plan,
    budget_of,
    make_plan,
    plan_paper,
    plan_range,
    starved,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``plan`` to its parser."""
    parser.description = (
        "Divide Newton-Schulz steps among operator types: with --ell as the AMO paper does, with "
        "--plan from the measurements in a run's plan. Print the plan beside the uniform schedule. "
        "Example: amo plan --ell attn_q=3.0e-4 --ell attn_k=1.3e-3 --budget-ratio 0.9"
    )
    source = parser.add_mutually_exclusive_group(required=True)
    text = "ell target of an operator type, in (0, 1]; repeat the option for each type"
    source.add_argument("--ell", metavar="TYPE=VALUE", action="append", help=text)
    text = f"{PLAN_FILE} of a run, or the run's folder; with a further option, plan again"
    source.add_argument("--plan", metavar="FILE", type=Path, help=text)
    text = "work of the plan, as a multiple of the uniform schedule's"
    parser.add_argument("--budget-ratio", type=float, help=text)
    parser.add_argument("--min-steps", type=int, help="fewest steps of a type")
    parser.add_argument("--max-steps", type=int, help="most steps of a type")
    text = f"print the plan as JSON, as in {PLAN_FILE}"
    parser.add_argument("--json", action="store_true", help=text)
    parser.set_defaults(run=run_plan)


def run_plan(args: argparse.Namespace) -> int:
    """Print the plan for parsed arguments.

    Raises:
        ValueError: An argument is malformed, a plan cannot be read, or a budget is infeasible.
        OSError: The plan's file cannot be read.
    """
    options = {field: getattr(args, field) for field in ("budget_ratio", "min_steps", "max_steps")}
    changes = {field: value for field, value in options.items() if value is not None}
    if args.plan is None:
        plan = plan_paper(AMOConfig.paper(**changes), _ells(args.ell))
    else:
        path = args.plan / PLAN_FILE if args.plan.is_dir() else args.plan
        # A pipe or a device may have no end.
        require(path.is_file(), "--plan", f"no file {path}", f"{PLAN_FILE} of a run")
        try:
            plan = Plan.from_json(path.read_text())
        except ValueError as error:
            raise ValueError(f"--plan {path}: {error}") from None
        plan = plan_again(plan, changes) if changes else plan
    warnings = [f"warning: {line}" for line in starved(plan)]
    print(plan.to_json() if args.json else "\n".join([str(plan), *warnings]))
    return 0


def _ells(texts: Sequence[str]) -> dict[str, float]:
    """Targets by operator type."""
    ells = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            ells[name] = float(value)
        except ValueError:
            raise ValueError(f"--ell: found {text!r}, expected TYPE=VALUE") from None
    return ells


def plan_again(plan: Plan, changes: dict[str, Any]) -> Plan:
    """Plan with other settings from what a plan holds.

    Args:
        plan: The plan of a run.
        changes: Fields of the config: ``budget_ratio``, ``min_steps``, ``max_steps``.

    Raises:
        ValueError: The plan has no measurements for these settings, or a budget is infeasible.
    """
    kept = ("planner", "base_steps", "base_ell", "min_steps", "max_steps")
    config = AMOConfig(**({name: getattr(plan, name) for name in kept} | changes))
    names = plan.operator_types
    if plan.planner == "paper":
        return plan_paper(config, dict(zip(names, plan.ell_target, strict=True)), plan.costs)
    assert plan.costs is not None
    budget_of(config, plan.costs)
    low, high = plan_range(config)
    is_measured = plan.min_steps <= low and high <= plan.max_steps
    own = f"measurements of {plan.min_steps} to {plan.max_steps} steps"
    require(is_measured, "--plan", own, f"{low} to {high}")
    part = slice(low - plan.min_steps, high - plan.min_steps + 1)
    curves = [ErrorCurve(c.ells[part], c.errors[part], c.uniform) for c in plan.curves]
    return make_plan(config, dict(zip(names, curves, strict=True)), plan.weights, plan.costs)
