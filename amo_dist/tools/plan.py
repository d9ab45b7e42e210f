"""The command ``plan``: what AMO would commit to, and what that gains over the uniform schedule."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from amo_dist.config import BUDGET_RATIO, AMOConfig
from amo_dist.schedule import budget as budgets
from amo_dist.schedule.fields import read_file
from amo_dist.schedule.plan import PLAN_FILE, Plan
from amo_dist.schedule.plan_table import plan_table, starved
from amo_dist.schedule.planning import plan_allocation, plan_inputs, plan_measured
from amo_dist.schedule.trials import Measured
from amo_dist.tools.command import Subparsers, print_text, read_pair

_OPTIONS = {
    "budget_ratio": "planned work over the uniform one's",
    "base_steps": "steps of the uniform schedule",
    "min_steps": "fewest steps a type may get",
    "max_steps": "most steps a type may get",
}
"""Fields of the config that are options, and what their help says."""


def add_plan_command(subparsers: Subparsers) -> None:
    """Register ``plan``."""
    parser = subparsers.add_parser(
        "plan",
        help="allocate Newton-Schulz steps for given ell targets, or show and redo a run's plan",
        description="Allocate Newton-Schulz steps to operator types and compose their "
        "coefficients: by projected errors for given targets, as the AMO paper does, or by what "
        "the plan of a run holds. Each plan stands beside the uniform schedule.",
        epilog="examples: %(prog)s --ell attn_q=3.0e-4 --ell attn_k=1.3e-3 --budget-ratio 0.9; "
        "%(prog)s --plan outputs/quickstart --as-good-as kj",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--ell",
        metavar="TYPE=VALUE",
        action="append",
        help="ell target of an operator type, in (0, 1]; once for each type",
    )
    source.add_argument(
        "--plan",
        metavar="FILE",
        help=f"{PLAN_FILE} of a run, or the run's folder: show its plan; with a budget or a range "
        "of steps, plan again from what was observed",
    )
    for field, text in _OPTIONS.items():
        default = getattr(AMOConfig.paper(), field)
        parser.add_argument(
            f"--{field.replace('_', '-')}",
            type=type(default),
            help=f"{text} (default {default}; with --plan the run's)",
        )
    parser.add_argument(
        "--as-good-as",
        metavar="SCHEDULE",
        help="with --plan: the fewest flops whose error is no greater than that of uniform, or of "
        "a fixed schedule such as kj, on the same spectra",
    )
    parser.add_argument("--json", action="store_true", help="print the plan as a run's file has it")
    parser.set_defaults(run=run_plan)


def run_plan(args: argparse.Namespace) -> int:
    """Print the plan for parsed arguments.

    Raises:
        ValueError: An argument is malformed, a plan cannot be read, or a budget is infeasible.
    """
    found: Plan | None = None
    if args.plan is None:
        _refuse("--as-good-as", args.as_good_as, "--ell: it needs spectra")
        ells, settings = _ells(args.ell), AMOConfig.paper()
        make = functools.partial(plan_allocation, ell_target_by_type=ells)
    else:
        _refuse("--base-steps", args.base_steps, "--plan: the uniform schedule is the run's")
        found = read_plan(args.plan)
        make, settings = functools.partial(_plan_again, found), _settings(found)
    given = _given(args, settings)
    config = dataclasses.replace(settings, **given)
    plan = make(config) if given or found is None else found
    warnings = [f"warning: {line}" for line in starved(plan)]
    lines = [plan_table(plan), *warnings]
    print_text(plan.to_json() if args.json else "\n".join(lines))
    return 0


def _given(args: argparse.Namespace, settings: AMOConfig) -> dict[str, Any]:
    """Fields of the config that options change."""
    given = {name: getattr(args, name) for name in _OPTIONS if getattr(args, name) is not None}
    if args.as_good_as is not None:
        _refuse(
            "--budget-ratio", args.budget_ratio, "--as-good-as, which asks for the fewest flops"
        )
        if settings.planner == "paper":
            expected = "one by measured errors, which knows what other schedules leave"
            raise ValueError(f"--as-good-as: found a plan by projected errors, expected {expected}")
        return {**given, "as_good_as": args.as_good_as, "budget_ratio": BUDGET_RATIO}
    if args.budget_ratio is not None:
        given["as_good_as"] = None
    return given


def _refuse(flag: str, value: object, beside: str) -> None:
    """Refuse an option that has nothing to say beside another."""
    if value is not None:
        raise ValueError(f"{flag}: found {value!r}, expected none with {beside}")


# ---------------------------------------------------------------- given targets


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
    """Those with which a plan was made."""
    return AMOConfig(
        planner="paper" if plan.criterion == "projected" else "measured",
        base_steps=plan.base_steps,
        base_ell=plan.base_ell,
        budget_ratio=_budget_ratio(plan) if plan.as_good_as is None else BUDGET_RATIO,
        as_good_as=plan.as_good_as,
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


def _plan_again(found: Plan, config: AMOConfig) -> Plan:
    """Plan from what a plan holds; only with the numbers of steps that were measured."""
    names = found.operator_types
    costs = None if found.costs is None else dict(zip(names, found.costs, strict=True))
    measured = _measured(found, plan_inputs(config, names, costs))
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
    assert costs is not None
    assert found.weights is not None
    return plan_measured(
        config,
        dict(zip(names, measured, strict=True)),
        num_matrices=found.num_matrices,
        weights=found.weights,
        ell_robust=found.ell_robust,
        costs=costs,
    )


def _measured(plan: Plan, inputs: Mapping[str, Any]) -> tuple[Measured, ...] | None:
    """What was measured, of the numbers of steps that a plan may give."""
    low, high = inputs["min_steps"], inputs["max_steps"]
    if plan.measured is None:
        return None
    if low < plan.min_steps or high > plan.max_steps:
        raise ValueError(
            f"--plan: found measurements of {plan.min_steps} to {plan.max_steps} steps, "
            f"expected {low} to {high}, which --min-steps, --max-steps or a budget of "
            f"{inputs['budget']} {inputs['budget_unit']} need"
        )
    some = slice(low - plan.min_steps, high - plan.min_steps + 1)
    names = ("ells", "residuals", "distances")
    return tuple(
        dataclasses.replace(one, **{name: getattr(one, name)[some] for name in names})
        for one in plan.measured
    )
