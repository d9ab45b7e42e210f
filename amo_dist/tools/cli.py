"""Commands of ``python -m amo_dist``; the front door of ``torchtitan_ext`` offers them too."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias, TypeVar

from amo_dist.config import AMOConfig
from amo_dist.schedule.budget import ns_step_flops
from amo_dist.schedule.plan import Plan, plan_allocation
from amo_dist.tools.simulate import add_simulate_command

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""What ``argparse.ArgumentParser.add_subparsers`` returns."""

_T = TypeVar("_T")


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Tell a mistake among the arguments, and exit with status 2."""
        print(f"{self.prog}: error: {message} (see --help)", file=sys.stderr)
        raise SystemExit(2)


def add_plan_command(subparsers: Subparsers) -> None:
    """Register ``plan``: what AMO would commit to for given ``ell`` targets."""
    parser = subparsers.add_parser(
        "plan",
        help="allocate Newton-Schulz steps for given ell targets",
        description="Allocate Newton-Schulz steps to operator types and compose their "
        "coefficients, as AMO does when its observations are complete.",
        epilog="example: amo_dist plan --ell attn_q=3.0e-4 --ell attn_k=1.3e-3 --budget-ratio 0.9",
    )
    _add_plan_inputs(parser)
    _add_planner_options(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run_plan)


def _add_plan_inputs(parser: argparse.ArgumentParser) -> None:
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


def _add_planner_options(parser: argparse.ArgumentParser) -> None:
    defaults = AMOConfig()
    options: Sequence[tuple[str, type, object, str]] = (
        ("--budget-ratio", float, defaults.budget_ratio, "planned work over the uniform one's"),
        ("--base-steps", int, defaults.base_steps, "steps of the uniform schedule"),
        ("--min-steps", int, defaults.min_steps, "fewest steps a type may get"),
        ("--max-steps", int, defaults.max_steps, "most steps a type may get"),
    )
    for flag, kind, default, text in options:
        parser.add_argument(flag, type=kind, default=default, help=f"{text} (default %(default)s)")
    parser.add_argument(
        "--planner",
        choices=("exact", "greedy"),
        default=defaults.planner,
        help="exact minimum, or the AMO paper's greedy passes (default %(default)s)",
    )
    parser.add_argument(
        "--budget-unit",
        choices=("steps", "flops"),
        default=defaults.budget_unit,
        help="what the budget counts (default %(default)s)",
    )


def run_plan(args: argparse.Namespace) -> int:
    """Print the plan for parsed arguments.

    Raises:
        ValueError: An argument is malformed or the budget infeasible.
    """
    ells = _ells(args.ell)
    config = AMOConfig(
        budget_ratio=args.budget_ratio,
        base_steps=args.base_steps,
        min_steps=args.min_steps,
        max_steps=args.max_steps,
        planner=args.planner,
        budget_unit=args.budget_unit,
    )
    plan = plan_allocation(config, ells, costs=_costs(args.shape, ells))
    print(json.dumps(_as_json(plan), indent=2) if args.json else plan.table())
    return 0


def _as_json(plan: Plan) -> dict[str, Any]:
    """The plan for other programs; its numbers print and read back exactly."""
    return {
        "budget": plan.budget,
        "budget_unit": plan.budget_unit,
        "planner": plan.planner,
        "min_steps": plan.min_steps,
        "max_steps": plan.max_steps,
        "ell_target": dict(zip(plan.operator_types, plan.ell_target, strict=True)),
        "allocation": dict(zip(plan.operator_types, plan.allocation, strict=True)),
        "objective": plan.objective,
        "coefficients": {
            name: [list(triple) for triple in schedule.coefficients]
            for name, schedule in plan.schedules().items()
        },
    }


def _ells(texts: Sequence[str]) -> dict[str, float]:
    ells: dict[str, float] = {}
    for text in texts:
        name, value = _pair("--ell", text, float, "TYPE=VALUE, e.g. attn_q=3e-4")
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
        name, cost = _pair("--shape", text, _flops, "TYPE=MxN or TYPE=MxNxCOUNT, integers > 0")
        costs[name] = costs.get(name, 0) + cost
    if not costs:
        return None
    if missing := sorted(set(ells) - set(costs)):
        raise ValueError(f"--shape: found none for {', '.join(missing)}, expected one per --ell")
    if unknown := sorted(set(costs) - set(ells)):
        raise ValueError(f"--shape: found {', '.join(unknown)}, expected only types with an --ell")
    return costs


def _pair(flag: str, text: str, kind: Callable[[str], _T], expected: str) -> tuple[str, _T]:
    """Split ``name=value`` and read the value."""
    name, _, value = text.partition("=")
    try:
        if name:
            return name, kind(value)
    except ValueError:
        pass
    raise ValueError(f"{flag}: found {text!r}, expected {expected}")


def _flops(text: str) -> int:
    sizes = [int(size) for size in text.split("x")]
    if len(sizes) not in (2, 3) or min(sizes) < 1:
        raise ValueError(text)
    m, n, count = (*sizes, 1)[:3]
    return ns_step_flops(m, n) * count


COMMANDS: tuple[Callable[[Subparsers], None], ...] = (add_plan_command, add_simulate_command)
"""Each registers one command, whose parser sets ``run``: parsed arguments to an exit status."""


def add_commands(subparsers: Subparsers) -> None:
    """Register every command of ``amo_dist``.

    Args:
        subparsers: Of any parser. Its program calls ``args.run(args)``, which returns an exit
            status and raises ``ValueError`` for a mistake of the user's.
    """
    for add_command in COMMANDS:
        add_command(subparsers)


def run_command(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> int:
    """Parse arguments and run the command that they name.

    A command whose parser sets ``overrides`` gets there the options that it does not know.

    Args:
        parser: With the commands, as :func:`add_commands` registers them.
        argv: Arguments after the program's name; those of the process by default.

    Returns:
        The command's own exit status, 2 for a mistake of the user's (told in one line), or 0 where
        the reader of the output, such as ``head``, has seen enough and closed it.
    """
    try:
        status = _run(parser, argv)
        sys.stdout.flush()  # else what is left would fail at the end of the process
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


def _run(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    try:
        args, rest = parser.parse_known_args(argv)
        if hasattr(args, "overrides"):
            args.overrides = rest
        elif rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
    except SystemExit as stop:  # after --help, or an error that argparse reported
        return int(stop.code or 0)
    try:
        status: int = args.run(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments after the program's name; those of the process by default.

    Returns:
        0, or 2 for a mistake of the user's, which is reported in one line.
    """
    parser: argparse.ArgumentParser = Parser(
        prog="amo_dist", description="Tools of AMO that need no training run."
    )
    add_commands(parser.add_subparsers(metavar="COMMAND", required=True))
    return run_command(parser, argv)
