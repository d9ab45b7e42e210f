"""The plan: how many Newton-Schulz steps each operator type gets, and for which ``ell``.

``planner = "measured"`` minimises the squared error of the update. An observation tries candidates,
every number of steps that a plan may give with every ``ell`` of a grid, on the singular values of
each sampled matrix. Errors are exact, since a schedule maps each singular value by itself, say to
``y``: the mean over the directions of the short side of the squared distance to the polar factor,
``(y - 1)^2``; where updates have the exact norm, that of ``y`` scaled to it. Times
`MatrixInfo.weight` it is the squared error of the update.

``planner = "paper"`` minimises the errors that schedules leave at one singular value of each type,
its ``ell_target``, as in the AMO paper.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple, TypeAlias

from amo_dist.config import MOST_STEPS, PlanConfig, fail, sort_operator_types
from amo_dist.schedule.allocate import (
    exact_ratio,
    flop_budget,
    greedy,
    least_error,
    round_half_up,
    step_budget,
)
from amo_dist.schedule.polar_express import error_curve, schedule_for, times_safety

PLAN_FILE = "plan.json"
"""Name of the file in a run's folder, once AMO has planned."""

OBJECTIVES = {"measured": "squared error of the update", "paper": "projected error"}
"""Name of the objective that each planner minimises."""

StepsAndElls: TypeAlias = Mapping[str, tuple[int, float]]
"""Newton-Schulz steps and effective ``ell`` of each operator type."""

_MANTISSAS = (1.0, 1.26, 1.58, 2.0, 2.51, 3.16, 3.98, 5.01, 6.31, 7.94)
GRID = (*(float(f"{m}e{exponent}") for exponent in range(-5, -1) for m in _MANTISSAS), 0.1)
"""Every ``ell`` that is tried, beside ``base_ell``: ten a decade."""


class ErrorCurve(NamedTuple):
    """Errors of one operator type, with one entry for each number of steps that a plan may give.

    Attributes:
        ells: Effective ``ell`` for which the schedule of so many steps is composed.
        errors: Error that it leaves.
        uniform: Error that the uniform schedule leaves.
    """

    ells: tuple[float, ...]
    errors: tuple[float, ...]
    uniform: float


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """The plan that AMO commits to. Sequences are in the order of ``operator_types``.

    It is complete in itself: every schedule from the plan on follows from it alone.

    Raises:
        ValueError: Fields are at odds with one another; names the field.
    """

    planner: str
    """Rule that made the plan, as the setting names it."""
    operator_types: tuple[str, ...]
    base_steps: int
    base_ell: float
    budget: int
    """Most flops of one optimizer step (``measured``), or exact total of steps (``paper``)."""
    min_steps: int
    """Fewest steps of a type, after the budget lowered the setting if it had to."""
    max_steps: int
    """Most steps of a type, after the budget raised the setting if it had to."""
    costs: tuple[int, ...] | None
    """Flops of one Newton-Schulz step of all matrices of each type; ``None`` if unknown."""
    weights: tuple[float, ...]
    """Factor by which the error of each type counts: its share in the whole update's squared norm
    (``measured``), or 1 (``paper``)."""
    curves: tuple[ErrorCurve, ...]
    """Errors of each type at ``min_steps`` to ``max_steps`` steps."""
    allocation: tuple[int, ...]
    """Planned steps of each type."""

    def __post_init__(self) -> None:
        if self.planner not in OBJECTIVES:
            fail("plan.planner", self.planner, f"one of {', '.join(map(repr, OBJECTIVES))}")
        num_types, num_steps = len(self.operator_types), self.max_steps - self.min_steps + 1
        for name in ("costs", "weights", "curves", "allocation"):
            value = getattr(self, name)
            if value is not None and len(value) != num_types:
                fail(f"plan.{name}", value, f"one entry for each of {num_types} operator types")
        for curve, steps in zip(self.curves, self.allocation, strict=True):
            if not self.min_steps <= steps <= self.max_steps:
                fail("plan.allocation", steps, f"{self.min_steps} to {self.max_steps} steps")
            if not len(curve.ells) == len(curve.errors) == num_steps:
                fail("plan.curves", curve, f"an entry for each of {num_steps} numbers of steps")
            if not all(0 < ell <= 1 for ell in curve.ells):
                fail("plan.curves", curve.ells, "each ell in (0, 1]")

    def __str__(self) -> str:
        """Table beside the uniform schedule: ``ell``, steps, error and flops of each type."""
        word = self.error_name
        before, after = errors_beside_uniform(self)
        rows = [["operator type", "ell target", "steps before", "after", f"{word} before", "after"]]
        rows += [
            [name, f"{ell:.5e}", f"{self.base_steps}", f"{steps}", f"{old:.4f}", f"{new:.4f}"]
            for name, ell, steps, old, new in zip(
                self.operator_types, self.ell_target, self.allocation, before, after, strict=True
            )
        ]
        total = self.base_steps * len(self.operator_types)
        rows.append(["total", "", f"{total}", f"{sum(self.allocation)}", "", ""])
        if self.costs is not None:
            pairs = zip(self.allocation, self.costs, strict=True)
            more = [(steps - self.base_steps) * cost for steps, cost in pairs]
            cells = ["NS Gflop/step", *(f"{flops / 1e9:+.4g}" for flops in (*more, sum(more)))]
            for row, cell in zip(rows, cells, strict=True):
                row.append(cell)
        return "\n".join([*_aligned(rows), *_summary(self)])

    @property
    def ell_target(self) -> tuple[float, ...]:
        """``ell`` for which the coefficients are made, at ``SAFETY`` times it."""
        chosen = zip(self.curves, self.allocation, strict=True)
        return tuple(curve.ells[steps - self.min_steps] for curve, steps in chosen)

    @property
    def errors(self) -> tuple[float, ...]:
        """The error of each type under the plan."""
        chosen = zip(self.curves, self.allocation, strict=True)
        return tuple(curve.errors[steps - self.min_steps] for curve, steps in chosen)

    @property
    def uniform_errors(self) -> tuple[float, ...]:
        """The error of each type under the uniform schedule."""
        return tuple(curve.uniform for curve in self.curves)

    @property
    def objective(self) -> float:
        """Errors of the allocation, summed over types, each times its weight."""
        return math.fsum(map(operator.mul, self.errors, self.weights))

    @property
    def uniform_objective(self) -> float:
        """The objective of the uniform schedule."""
        return math.fsum(map(operator.mul, self.uniform_errors, self.weights))

    @property
    def error_name(self) -> str:
        """Figures of each type for reports; of ``measured`` the root mean square."""
        return "distance" if self.planner == "measured" else "projected error"

    @property
    def flops_ratio(self) -> float | None:
        """Flops of the plan over those of the uniform schedule; None where costs are unknown."""
        if self.costs is None:
            return None
        spent = sum(map(operator.mul, self.costs, self.allocation))
        return float(spent / (self.base_steps * sum(self.costs)))

    def state_at(self, progress: Fraction) -> StepsAndElls:
        """Steps and effective ``ell`` of each type on the way from the uniform schedule.

        Both interpolate linearly in exact arithmetic. A measured plan rounds the steps of each type
        by themselves, halves toward the plan, so that none turns back. Of the paper's the total of
        steps is rounded half up first, then the counts, by largest remainder, so that they sum to
        it.

        Args:
            progress: Share of the way, in [0, 1]; 1 is the plan.
        """

        def between(first: float, last: float) -> Fraction:
            return Fraction(first) + progress * (Fraction(last) - Fraction(first))

        exact = [between(self.base_steps, steps) for steps in self.allocation]
        if self.planner == "measured":
            steps = list(map(_round_toward, exact, self.allocation))
        else:
            steps = _round_to_sum(exact)
        ells = (float(between(self.base_ell, ell)) for ell in self.ell_target)
        return dict(zip(self.operator_types, zip(steps, ells, strict=True), strict=True))

    def to_json(self) -> str:
        """Text from which ``from_json`` restores the plan bit for bit."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read and check what ``to_json`` wrote.

        Raises:
            ValueError: The text is not JSON, or not that of a plan; names the field.
        """
        try:
            return cls.from_dict(json.loads(text))
        except (LookupError, TypeError, AttributeError, RecursionError, json.JSONDecodeError) as e:
            raise ValueError(f"plan: found other text ({e!r}), expected a plan as JSON") from None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        """The plan of JSON values, as ``dataclasses.asdict`` gives them.

        Raises:
            ValueError: Fields are at odds with one another; names the field.
            TypeError: A field is missing, unknown or of another kind.
        """
        curves = tuple(
            ErrorCurve(tuple(ells), tuple(errors), uniform)
            for ells, errors, uniform in values["curves"]
        )
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        return cls(**{**fields, "curves": curves})


# ---------------------------------------------------------------- planners


def plan_range(config: PlanConfig, num_types: int = 1) -> tuple[int, int]:
    """Fewest and most steps that a plan may give an operator type.

    Args:
        config: Planner, budget and range of steps.
        num_types: Number of operator types, for ``paper``: its range is widened as far as the
            budget needs it.
    """
    low, high, base = config.min_steps, config.max_steps, config.base_steps
    if config.planner == "paper":
        total = step_budget(config.budget_ratio, num_types, base)
        return min(low, total // num_types), max(high, -(-total // num_types))
    low = min(low, max(math.floor(exact_ratio(config.budget_ratio) * base), 1))
    if config.budget_ratio >= 1:
        low, high = min(low, base), max(high, base)  # no plan may be worse than uniform
    return low, high


def check_budget(config: PlanConfig, costs: Sequence[int]) -> int:
    """The budget of a plan: flops, or steps for ``paper``.

    Args:
        config: Planner, budget and range of steps.
        costs: Flops of one step of all matrices of each type.

    Raises:
        ValueError: Even one step of every type is over the budget, or it takes more than 100.
    """
    num_types, least = len(costs), sum(costs)
    if config.planner == "paper":
        budget, least = step_budget(config.budget_ratio, num_types, config.base_steps), num_types
        if budget > max(config.max_steps, MOST_STEPS) * num_types:
            expected = f"at most {MOST_STEPS} steps of each of {num_types} operator types"
            fail("budget", budget, expected)
    else:
        budget = flop_budget(config.budget_ratio, costs, config.base_steps)
    if budget < least:
        fail("budget", budget, f"at least {least}, one step of every operator type")
    return budget


def candidates(config: PlanConfig) -> tuple[tuple[int, float], ...]:
    """Numbers of steps, each with every ``ell``, whose errors an observation measures.

    None for ``paper``. The uniform schedule is always among them.
    """
    if config.planner == "paper":
        return ()
    low, high = plan_range(config)
    steps, ells = {*range(low, high + 1), config.base_steps}, {*GRID, config.base_ell}
    return tuple((k, ell) for k in sorted(steps) for ell in sorted(ells))


def best_curve(config: PlanConfig, errors: Sequence[float] | None) -> ErrorCurve:
    """The ``ell`` of least error for each number of steps; ties go to the greater.

    Args:
        config: Settings of `candidates`.
        errors: Mean error of each candidate. None where no matrix was valid: errors are then those
            of singular values that are all at ``base_ell``, without the exact norm.
    """
    low, high = plan_range(config)
    uniform, steps = (config.base_steps, config.base_ell), range(low, high + 1)
    if errors is None:
        worst = error_curve(times_safety(config.base_ell), {*steps, config.base_steps})
        squares = {k: error * error for k, error in worst.items()}
        ells = (config.base_ell,) * len(steps)
        return ErrorCurve(ells, tuple(squares[k] for k in steps), squares[config.base_steps])
    error_of = dict(zip(candidates(config), errors, strict=True))
    best = [
        min((error, -ell) for (count, ell), error in error_of.items() if count == k) for k in steps
    ]
    least, negatives = zip(*best, strict=True)
    return ErrorCurve(tuple(-ell for ell in negatives), least, error_of[uniform])


def plan_measured(
    config: PlanConfig,
    curves: Mapping[str, ErrorCurve],
    weights: Sequence[float],
    costs: Sequence[int],
) -> Plan:
    """Plan by the error of the update: measured distances, weighted by what they stand for.

    Where the budget allows the uniform schedule, the plan's objective is at most that one's. A pure
    function of its arguments, the same bits on every machine.

    Args:
        config: Budget and range of steps.
        curves: Errors of each operator type, in the declared order of types.
        weights: Share of each type in the whole update's squared norm.
        costs: Flops of one Newton-Schulz step of each type.

    Raises:
        ValueError: The budget is infeasible.
    """
    budget, (low, high) = check_budget(config, costs), plan_range(config)
    weighted = [
        dict(enumerate((weight * error for error in curve.errors), low))
        for curve, weight in zip(curves.values(), weights, strict=True)
    ]
    plan = _plan(config, budget, (low, high), curves, least_error(weighted, budget, costs))
    plan = dataclasses.replace(plan, weights=tuple(weights), costs=tuple(costs))
    assert config.budget_ratio < 1 or plan.objective <= plan.uniform_objective
    return plan


def plan_paper(
    config: PlanConfig, ell_target: Mapping[str, float], costs: Sequence[int] | None = None
) -> Plan:
    """Plan as the paper does; a pure function of its arguments, the same bits on every machine.

    Args:
        config: Budget and range of steps.
        ell_target: Target of each operator type, in (0, 1].
        costs: Flops of one Newton-Schulz step of each type, in their declared order; for reports.

    Raises:
        ValueError: A target is out of range, or the budget is infeasible.
    """
    names = sort_operator_types(ell_target)
    budget = check_budget(config, costs or (1,) * len(names))
    low, high = plan_range(config, len(names))
    uniform = schedule_for(config.base_ell, config.base_steps)
    curves: dict[str, ErrorCurve] = {}
    for name in names:
        ell = float(ell_target[name])
        errors = error_curve(times_safety(ell), range(low, high + 1))
        lowest = times_safety(min(ell, config.base_ell))
        curves[name] = ErrorCurve(
            (ell,) * len(errors), tuple(errors.values()), 1.0 - uniform.image(lowest)
        )
    by_steps = [dict(enumerate(curve.errors, low)) for curve in curves.values()]
    allocation = greedy(by_steps, budget, config.base_steps)
    plan = _plan(config, budget, (low, high), curves, allocation)
    return dataclasses.replace(plan, costs=None if costs is None else tuple(costs))


def _plan(
    config: PlanConfig,
    budget: int,
    steps: tuple[int, int],
    curves: Mapping[str, ErrorCurve],
    allocation: tuple[int, ...],
) -> Plan:
    return Plan(
        planner=config.planner,
        operator_types=tuple(curves),
        base_steps=config.base_steps,
        base_ell=float(config.base_ell),
        budget=budget,
        min_steps=steps[0],
        max_steps=steps[1],
        costs=None,
        weights=(1.0,) * len(curves),
        curves=tuple(curves.values()),
        allocation=allocation,
    )


def shrunk(config: PlanConfig, ell_robust: float) -> float:
    """Target of the paper, ``shrinkage * ell + (1 - shrinkage) * base_ell``, rounded once."""
    alpha = exact_ratio(config.shrinkage)
    return float(alpha * Fraction(ell_robust) + (1 - alpha) * Fraction(config.base_ell))


def _round_toward(value: Fraction, end: int) -> int:
    """The nearest integer; of two, the one that is nearer to the end."""
    half = Fraction(1, 2)
    return math.floor(value + half) if value <= end else math.ceil(value - half)


def _round_to_sum(values: Sequence[Fraction]) -> list[int]:
    """Integers that sum to the rounded sum, by largest remainder; ties to the earlier."""
    counts = [math.floor(value) for value in values]
    by_remainder = sorted(range(len(values)), key=lambda i: (counts[i] - values[i], i))
    for i in by_remainder[: round_half_up(sum(values, Fraction(0))) - sum(counts)]:
        counts[i] += 1
    return counts


# ---------------------------------------------------------------- reports


def errors_beside_uniform(plan: Plan) -> tuple[list[float], list[float]]:
    """The error of each type under the uniform schedule, and under the plan.

    Root mean squares over the sampled matrices of a measured plan; else projected errors.
    """
    before, after = list(plan.uniform_errors), list(plan.errors)
    if plan.planner == "paper":
        return before, after
    return list(map(math.sqrt, before)), list(map(math.sqrt, after))


def remarks(plan: Plan, config: PlanConfig) -> list[str]:
    """Lines for the log on a plan that departs from the settings, or starves a type."""
    asked, relaxed = (config.min_steps, config.max_steps), (plan.min_steps, plan.max_steps)
    if relaxed == asked:
        return starved(plan)
    why = "the budget is infeasible within"
    if plan.planner == "measured" and relaxed[1] > config.max_steps:
        why = f"the {config.base_steps} steps of the uniform schedule are beyond"
    head = f"{why} {asked[0]} to {asked[1]} steps per type; the range becomes"
    return [f"{head} {relaxed[0]} to {relaxed[1]}", *starved(plan)]


def starved(plan: Plan) -> list[str]:
    """One line on what a plan by the paper's passes takes from its types; no other does.

    A type is starved where it gets fewer steps than an easier one.
    """
    if plan.planner != "paper":
        return []
    errors = list(zip(plan.uniform_errors, plan.errors, strict=True))
    types, steps, parts = range(len(errors)), plan.allocation, []
    for i in sorted(types, key=lambda i: errors[i][0] - errors[i][1]):
        easier = [j for j in types if plan.ell_target[j] > plan.ell_target[i]]
        most = max(easier, key=lambda j: steps[j], default=i)
        if steps[most] > steps[i]:
            parts.append(
                f"{plan.operator_types[i]}: {steps[i]} Newton-Schulz steps, where the easier "
                f"{plan.operator_types[most]} gets {steps[most]}; {plan.error_name} "
                f"{errors[i][1]:.4f} (uniform: {errors[i][0]:.4f})"
            )
    return [f"the plan starves {'; '.join(parts)}"] if parts else []


def _summary(plan: Plan) -> list[str]:
    error, uniform = OBJECTIVES[plan.planner], f"{plan.base_steps} steps of every type"
    flops = "" if plan.flops_ratio is None else f", at {plan.flops_ratio:.1%} of their flops"
    unit = "flops" if plan.planner == "measured" else "steps"
    limits = f"{plan.min_steps} to {plan.max_steps} steps per type"
    return [
        f"{error} {plan.objective:.5f}, that of {uniform} {plan.uniform_objective:.5f}{flops}",
        f"budget {plan.budget} {unit}, {limits}, planner {plan.planner}",
    ]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
