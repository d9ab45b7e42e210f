"""The command ``plan``: what AMO would commit to, and what that gains over the uniform schedule."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from amo_dist.config import AMOConfig
from amo_dist.schedule import budget as budgets
from amo_dist.schedule.fields import read_file
from amo_dist.schedule.plan import PLAN_FILE, Plan, starved
from amo_dist.schedule.planning import (
    plan_allocation,
    plan_inputs,
    plan_measured,
    steps_to_try,
)
from amo_dist.schedule.trials import Measured
from amo_dist.tools.command import Subparsers, print_text, read_pair

_OPTIONS = {
    "budget_ratio": "work of the plan, as a multiple of the uniform schedule's",
    "base_steps": "steps of the uniform schedule",
    "min_steps": "fewest steps of a type",
    "max_steps": "most steps of a type",
}
"""Fields of the config that are options, and their help."""


def add_plan_command(subparsers: Subparsers) -> None:
    """Register ``plan``."""
    parser = subparsers.add_parser(
        "plan",
        help="plan Newton-Schulz steps by operator type, from ell targets or from a run's plan",
        description="Divide Newton-Schulz steps among operator types and compose their "
        "coefficients: with --ell as the AMO paper does, or with --plan from the measurements in a "
        "run's plan. Print each plan beside the uniform schedule.",
        epilog="examples: %(prog)s --ell attn_q=3.0e-4 --ell attn_k=1.3e-3 --budget-ratio 0.9; "
        "%(prog)s --plan outputs/quickstart --budget-ratio 0.9",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--ell",
        metavar="TYPE=VALUE",
        action="append",
        help="ell target of an operator type, in (0, 1]: the smallest singular value, relative to "
        "the norm, for which its coefficients are made; repeat the option for each type",
    )
    source.add_argument(
        "--plan",
        metavar="FILE",
        help=f"{PLAN_FILE} of a run, or the run's folder: show its plan; with a budget or a "
        "range of steps, plan again from the run's measurements",
    )
    for field, text in _OPTIONS.items():
        default = getattr(AMOConfig.paper(), field)
        parser.add_argument(
            f"--{field.replace('_', '-')}",
            type=type(default),
            help=f"{text} (default {default}; with --plan the run's)",
        )
    parser.add_argument(
        "--json", action="store_true", help=f"print the plan as JSON, as in {PLAN_FILE}"
    )
    parser.set_defaults(run=run_plan)


def run_plan(args: argparse.Namespace) -> int:
    """Print the plan for parsed arguments.

    Raises:
        ValueError: An argument is malformed, a plan cannot be read, or a budget is infeasible.
    """
    stored: Plan | None = None
    if args.plan is None:
        ells, settings = _ells(args.ell), AMOConfig.paper()
        make = functools.partial(plan_allocation, ell_target_by_type=ells)
    else:
        _refuse("--base-steps", args.base_steps, "--plan: the uniform schedule is the run's")
        stored = read_plan(args.plan)
        make, settings = functools.partial(_plan_again, stored), _settings(stored)
    changes = {name: getattr(args, name) for name in _OPTIONS if getattr(args, name) is not None}
    config = dataclasses.replace(settings, **changes)
    plan = make(config) if changes or stored is None else stored
    warnings = [f"warning: {line}" for line in starved(plan)]
    lines = [str(plan), *warnings]
    print_text(plan.to_json() if args.json else "\n".join(lines))
    return 0


def _refuse(flag: str, value: object, beside: str) -> None:
    """Refuse an option that means nothing beside another."""
    if value is not None:
        raise ValueError(f"{flag}: found {value!r}, expected none with {beside}")


# ---------------------------------------------------------------- targets


def _ells(texts: Sequence[str]) -> dict[str, float]:
    ells: dict[str, float] = {}
    for text in texts:
        name, value = read_pair("--ell", text, float, "TYPE=VALUE, e.g. attn_q=3e-4")
        if name in ells:
            raise ValueError(f"--ell: found {name!r} twice, expected each operator type once")
        if not 0.0 < value <= 1.0:
            raise ValueError(f"--ell: found {text!r}, expected a value in (0, 1]")
        ells[name] = value
    return ells


# ---------------------------------------------------------------- the plan of a run


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
        plan = Plan.from_json(read_file(path).decode())
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


def _settings(plan: Plan) -> AMOConfig:
    """The settings with which a plan was made."""
    return AMOConfig(
        planner=plan.planner,
        base_steps=plan.base_steps,
        base_ell=plan.base_ell,
        budget_ratio=_budget_ratio(plan),
        min_steps=plan.min_steps,
        max_steps=plan.max_steps,
    )


def _budget_ratio(plan: Plan) -> float:
    """The ratio of a plan's budget to the uniform schedule's work, never below it."""
    if plan.budget_unit == "steps" or plan.costs is None:
        return plan.budget / (plan.base_steps * len(plan.operator_types))
    ratio = plan.budget / (plan.base_steps * sum(plan.costs))
    # Rounded down, the ratio would give a flop less.
    if budgets.flop_budget(ratio, plan.costs, plan.base_steps) < plan.budget:
        ratio = math.nextafter(ratio, math.inf)
    return ratio


def _plan_again(stored: Plan, config: AMOConfig) -> Plan:
    """Plan again from what a plan holds, with the numbers of steps that were measured alone."""
    names = stored.operator_types
    costs = None if stored.costs is None else dict(zip(names, stored.costs, strict=True))
    inputs = plan_inputs(config, names, costs)
    if stored.criterion == "projected":
        return plan_allocation(
            config,
            dict(zip(names, stored.ell_target, strict=True)),
            ell_robust=stored.ell_robust,
            costs=costs,
            num_matrices=stored.num_matrices,
            measured=_measured(stored, inputs["min_steps"], inputs["max_steps"], inputs),
        )
    tried = steps_to_try(config)
    measured = _measured(stored, tried[0], tried[-1], inputs)
    assert measured is not None
    assert costs is not None
    assert stored.weights is not None
    return plan_measured(
        config,
        dict(zip(names, measured, strict=True)),
        num_matrices=stored.num_matrices,
        weights=stored.weights,
        ell_robust=stored.ell_robust,
        costs=costs,
    )


def _measured(
    plan: Plan, low: int, high: int, inputs: Mapping[str, Any]
) -> tuple[Measured, ...] | None:
    """The measurements of a plan for a range of steps."""
    if plan.measured is None:
        return None
    first, last = plan.measured[0].min_steps, plan.measured[0].max_steps
    if low < first or high > last:
        raise ValueError(
            f"--plan: found measurements of {first} to {last} steps, expected {low} to {high}, "
            "which --min-steps, --max-steps or a budget of "
            f"{inputs['budget']} {inputs['budget_unit']} need"
        )
    return tuple(measured.within(low, high) for measured in plan.measured)
