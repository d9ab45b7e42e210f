"""The command ``plan``: what AMO would commit to, and what that gains over the uniform schedule."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from amo_dist.config import AMOConfig
from amo_dist.schedule.budget import ns_step_flops
from amo_dist.schedule.plan import Plan
from amo_dist.schedule.plan_table import errors_beside_uniform, plan_table, starved
from amo_dist.tools.command import Subparsers, read_pair
from amo_dist.tools.plan_source import PLAN_FILE, Stored, Targets, read_plan
from amo_dist.tools.plan_sweep import read_sweep, sweep, sweep_json, sweep_table

_OPTIONS = {
    "budget_ratio": "planned work over the uniform one's",
    "base_steps": "steps of the uniform schedule",
    "min_steps": "fewest steps a type may get",
    "max_steps": "most steps a type may get",
    "planner": "exact minimum, or the AMO paper's greedy passes; flops need exact",
    "budget_unit": "what the budget counts",
}
"""Fields of the config that are options, and what their help says."""

_CHOICES = {"planner": ("exact", "greedy"), "budget_unit": ("steps", "flops")}


def add_plan_command(subparsers: Subparsers) -> None:
    """Register ``plan``."""
    parser = subparsers.add_parser(
        "plan",
        help="allocate Newton-Schulz steps for given ell targets, or show and redo a run's plan",
        description="Allocate Newton-Schulz steps to operator types and compose their "
        "coefficients: by projected errors for given targets, as the AMO paper does, or by what "
        "the plan of a run holds. Each plan stands beside the uniform schedule.",
        epilog="examples: %(prog)s --ell attn_q=3.0e-4 --ell attn_k=1.3e-3 --budget-ratio 0.9; "
        "%(prog)s --plan outputs/quickstart --sweep 0.7:1.2",
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
        help=f"{PLAN_FILE} of a run, or the run's folder: show its plan; with a budget, a range of "
        "steps or --sweep, plan again from what was observed",
    )
    parser.add_argument(
        "--shape",
        metavar="TYPE=MxN[xCOUNT]",
        action="append",
        default=[],
        help="shape of a type's matrices and how many there are (default 1); may be repeated, "
        "also for one type. Needed for a budget of flops; else it adds flops to the output",
    )
    for field, text in _OPTIONS.items():
        default = getattr(AMOConfig.paper(), field)
        parser.add_argument(
            f"--{field.replace('_', '-')}",
            type=type(default),
            choices=_CHOICES.get(field),
            help=f"{text} (default {default}; with --plan the run's)",
        )
    parser.add_argument(
        "--sweep",
        metavar="LOW:HIGH[:STEP]",
        help="plan at each budget ratio of a range (by steps of 0.05), and name the least at which "
        "the plan is no worse than uniform",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run_plan)


def run_plan(args: argparse.Namespace) -> int:
    """Print the plan, or the sweep, for parsed arguments.

    Raises:
        ValueError: An argument is malformed, a plan cannot be read, or a budget is infeasible.
    """
    source = _source(args)
    given = {name: getattr(args, name) for name in _OPTIONS if getattr(args, name) is not None}
    # Greedy knows only steps.
    implied = {"planner": "exact"} if args.budget_unit == "flops" else {}
    config = dataclasses.replace(source.settings, **{**implied, **given})
    if args.sweep is not None:
        _refuse("--budget-ratio", args.budget_ratio, "--sweep, which has a range of them")
        ratios = read_sweep(args.sweep)
        plans = sweep(source, config, ratios)
        print(_text(sweep_json(ratios, plans)) if args.json else sweep_table(ratios, plans))
        return 0
    plan = source.found if isinstance(source, Stored) and not given else source.plan(config)
    warnings = [f"warning: {line}" for line in starved(plan)]
    print(_text(_as_json(plan)) if args.json else "\n".join([plan_table(plan), *warnings]))
    return 0


def _source(args: argparse.Namespace) -> Targets | Stored:
    """What is planned from."""
    if args.plan is None:
        ells = _ells(args.ell)
        return Targets(ells, _costs(args.shape, ells))
    _refuse("--base-steps", args.base_steps, "--plan: the uniform schedule is the run's")
    _refuse("--shape", args.shape or None, "--plan: the shapes are the run's")
    return Stored(read_plan(args.plan))


def _refuse(flag: str, value: object, beside: str) -> None:
    """Refuse an option that has nothing to say beside another."""
    if value is not None:
        raise ValueError(f"{flag}: found {value!r}, expected none with {beside}")


def _text(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=2)


def _as_json(plan: Plan) -> dict[str, Any]:
    """The plan for other programs; its numbers print and read back exactly."""
    settings = ("criterion", "budget", "budget_unit", "planner", "min_steps", "max_steps")
    before, after = errors_beside_uniform(plan)

    def by_type(values: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(plan.operator_types, values, strict=True))

    return {
        **{name: getattr(plan, name) for name in settings},
        "ell_target": by_type(plan.ell_target),
        "allocation": by_type(plan.allocation),
        "objective": plan.objective,
        "uniform_objective": plan.uniform_objective,
        "flops_ratio": plan.flops_ratio,
        "error": plan.error_name,
        "errors_before": by_type(before),
        "errors_after": by_type(after),
        "warnings": starved(plan),
        "coefficients": {name: one.coefficients for name, one in plan.schedules().items()},
    }


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


def _costs(texts: Sequence[str], ells: Mapping[str, float]) -> dict[str, int] | None:
    """Flops of one step of each type; ``None`` where no shape is given."""
    costs: dict[str, int] = {}
    for text in texts:
        name, cost = read_pair("--shape", text, _flops, "TYPE=MxN or TYPE=MxNxCOUNT, integers > 0")
        costs[name] = costs.get(name, 0) + cost
    if costs and set(costs) != set(ells):
        found, expected = ", ".join(costs), ", ".join(ells)
        raise ValueError(f"--shape: found {found}, expected each type with an --ell: {expected}")
    return costs or None


def _flops(text: str) -> int:
    sizes = [int(size) for size in text.split("x")]
    if len(sizes) not in (2, 3) or min(sizes) < 1:
        raise ValueError(text)
    m, n, count = (*sizes, 1)[:3]
    return ns_step_flops(m, n) * count
