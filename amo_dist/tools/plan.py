"""The command ``plan``: what AMO would commit to for given ``ell`` targets."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from amo_dist.config import AMOConfig
from amo_dist.schedule.budget import ns_step_flops
from amo_dist.schedule.plan import Plan
from amo_dist.schedule.plan_table import plan_table
from amo_dist.schedule.planning import plan_allocation
from amo_dist.tools.command import Subparsers, read_pair

_OPTIONS = {
    "budget_ratio": "planned work over the uniform one's",
    "base_steps": "steps of the uniform schedule",
    "min_steps": "fewest steps a type may get",
    "max_steps": "most steps a type may get",
    "planner": "exact minimum, or the AMO paper's greedy passes",
    "budget_unit": "what the budget counts",
}
"""Fields of the config that are options, and what their help says."""

_CHOICES = {"planner": ("exact", "greedy"), "budget_unit": ("steps", "flops")}


def add_plan_command(subparsers: Subparsers) -> None:
    """Register ``plan``: what AMO would commit to for given ``ell`` targets."""
    parser = subparsers.add_parser(
        "plan",
        help="allocate Newton-Schulz steps for given ell targets",
        description="Allocate Newton-Schulz steps to operator types and compose their "
        "coefficients, as AMO does when its observations are complete.",
        epilog="example: amo_dist plan --ell attn_q=3.0e-4 --ell attn_k=1.3e-3 --budget-ratio 0.9",
    )
    parser.add_argument(
        "--ell",
        metavar="TYPE=VALUE",
        action="append",
        required=True,
        help="ell target of an operator type, in (0, 1]; once for each type",
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
        default = getattr(AMOConfig(), field)
        parser.add_argument(
            f"--{field.replace('_', '-')}",
            type=type(default),
            choices=_CHOICES.get(field),
            default=default,
            help=f"{text} (default %(default)s)",
        )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run_plan)


def run_plan(args: argparse.Namespace) -> int:
    """Print the plan for parsed arguments.

    Raises:
        ValueError: An argument is malformed or the budget infeasible.
    """
    ells = _ells(args.ell)
    config = AMOConfig(**{field: getattr(args, field) for field in _OPTIONS})
    plan = plan_allocation(config, ells, costs=_costs(args.shape, ells))
    print(json.dumps(_as_json(plan), indent=2) if args.json else plan_table(plan))
    return 0


def _as_json(plan: Plan) -> dict[str, Any]:
    """The plan for other programs; its numbers print and read back exactly."""
    settings = ("budget", "budget_unit", "planner", "min_steps", "max_steps")
    return {
        **{name: getattr(plan, name) for name in settings},
        "ell_target": dict(zip(plan.operator_types, plan.ell_target, strict=True)),
        "allocation": dict(zip(plan.operator_types, plan.allocation, strict=True)),
        "objective": plan.objective,
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
