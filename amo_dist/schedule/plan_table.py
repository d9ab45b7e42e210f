"""A plan beside the uniform schedule, as text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from amo_dist.schedule.plan import Plan

OBJECTIVES = {
    "update": "squared error of the update",
    "projected": "projected error",
}


def plan_table(plan: Plan) -> str:
    """Lines of text: of each group its ``ell``, and steps, error and flops beside uniform's.

    Errors are root mean squares where spectra were observed, else projected errors.
    """
    word = plan.error_name
    before, after = errors_beside_uniform(plan)
    groups = zip(plan.operator_types, plan.ell_target, plan.allocation, before, after, strict=True)
    rows = [("operator type", "ell target", "steps before", "after", f"{word} before", "after")]
    rows += [
        (name, f"{ell:.5e}", f"{plan.base_steps}", f"{steps}", f"{old:.4f}", f"{new:.4f}")
        for name, ell, steps, old, new in groups
    ]
    total = plan.base_steps * len(plan.operator_types)
    rows.append(("total", "", f"{total}", f"{sum(plan.allocation)}", "", ""))
    table = [list(row) for row in rows]
    if plan.costs is not None:
        more = [
            (steps - plan.base_steps) * cost
            for steps, cost in zip(plan.allocation, plan.costs, strict=True)
        ]
        cells = ["NS Gflop/step", *(f"{flops / 1e9:+.4g}" for flops in (*more, sum(more)))]
        for row, text in zip(table, cells, strict=True):
            row.append(text)
    return "\n".join([*_aligned(table), *_summary(plan), *_ladder_lines(plan)])


def errors_beside_uniform(plan: Plan) -> tuple[list[float], list[float]]:
    """The error of each group under the uniform schedule, and under the plan.

    Root mean squares over the sampled matrices, where there are any; else projected errors.
    """
    before, after = plan.uniform_errors, plan.errors
    if plan.measured is None:
        return list(before), list(after)
    if plan.criterion == "projected":
        chosen = zip(plan.measured, plan.allocation, strict=True)
        before = tuple(measured.uniform_residual for measured in plan.measured)
        after = tuple(measured.residual(steps) for measured, steps in chosen)
    return list(map(math.sqrt, before)), list(map(math.sqrt, after))


def starved(plan: Plan) -> list[str]:
    """Steps that a plan by the paper's passes takes from its groups, one per line; no other does.

    A group is starved where it gets fewer steps than an easier one. One more line names the others
    whose error is above that under the uniform schedule.
    """
    if plan.planner != "greedy":
        return []
    error_name = plan.error_name
    errors = list(zip(*errors_beside_uniform(plan), strict=True))
    groups, steps, lines, rising = range(len(errors)), plan.allocation, [], []
    for i in sorted(groups, key=lambda i: errors[i][0] - errors[i][1]):
        name, (old, new) = plan.operator_types[i], errors[i]
        easier = [j for j in groups if plan.ell_target[j] > plan.ell_target[i]]
        most = max(easier, key=lambda j: steps[j], default=i)
        if steps[most] > steps[i]:
            lines.append(
                f"the plan starves {name}: {steps[i]} Newton-Schulz steps, where the easier "
                f"{plan.operator_types[most]} gets {steps[most]}; {error_name} {new:.4f} "
                f"(uniform: {old:.4f})"
            )
        elif new > old:
            rising.append(f"{name} from {old:.4f} to {new:.4f}")
    if rising:
        lines.append(f"the plan raises the {error_name} of {', '.join(rising)}")
    return lines


def _summary(plan: Plan) -> list[str]:
    kind = OBJECTIVES[plan.criterion]
    flops = "" if plan.flops_ratio is None else f" at {plan.flops_ratio:.1%} of its flops"
    change = plan.objective / plan.uniform_objective - 1 if plan.uniform_objective else 0.0
    limits = f"{plan.min_steps} to {plan.max_steps} steps per type"
    uniform = f"uniform: {plan.uniform_objective:.5f}, {change:+.1%}"
    return [
        f"{kind} {plan.objective:.5f} ({uniform}){flops}",
        f"budget {plan.budget} {plan.budget_unit}, {limits}, {plan.planner} planner",
    ]


def _ladder_lines(plan: Plan) -> list[str]:
    """The ladder at rates that tell its form."""
    if plan.ladder is None:
        return []
    rows = [("learning rate / peak", *plan.operator_types, "flops / uniform")]
    for rate in (1.0, 0.8, 0.6, 0.4, 0.3, 0.2, 0.1):
        steps = plan.steps_at(rate)
        rows.append((f"{rate:g}", *map(str, steps), f"{plan.flops_ratio_of(steps):.3f}"))
    head = f"ladder after the lock: tau {plan.ladder.tau:g}, {len(plan.ladder.rungs)} rungs"
    return [head, *_aligned(rows)]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
