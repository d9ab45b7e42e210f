"""The plan: how many Newton-Schulz steps each operator type gets, and for which ``ell``.

``planner = "measured"`` minimises the squared error of the update. An observation tries candidates,
every number of steps that a plan may give with every ``ell`` of a grid, on the singular values of
each sampled matrix. Errors are exact, since a schedule maps each singular value by itself, say to
``y``: the mean over the directions of the short side of the squared distance to the polar factor,
``(y - 1)^2``; where updates are scaled to the exact norm, that of ``y`` times the factor of at most
2 by which they are. Times `MatrixInfo.weight` it is the squared error of the update.

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

from amo_dist.config import AMOConfig, fail, sort_operator_types
from amo_dist.schedule import allocate
from amo_dist.schedule.polar_express import error_curve, schedule_for, times_safety

# Name of the file in a run's folder, once AMO has planned.
PLAN_FILE = "plan.json"

# Newton-Schulz steps and effective ``ell`` of each operator type.
StepsAndElls: TypeAlias = Mapping[str, tuple[int, float]]

_MANTISSAS = (1.0, 1.26, 1.58, 2.0, 2.51, 3.16, 3.98, 5.01, 6.31, 7.94)
# Every ``ell`` that is tried, beside ``base_ell``: ten a decade.
GRID = (*(float(f"{m}e{exponent}") for exponent in range(-5, -1) for m in _MANTISSAS), 0.1)


class ErrorCurve(NamedTuple):
    """Errors of one operator type, with one entry for each number of steps that a plan may give.

    Attributes:
        ells: Effective ``ell`` of the schedule of so many steps, as `schedule_for` takes it.
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

    Attributes:
        planner: Rule that made the plan, as the setting names it.
        budget: Most flops of one optimizer step (``measured``), or exact total of steps
            (``paper``).
        min_steps: Fewest steps of a type, after the budget lowered the setting if it had to.
        max_steps: Most steps of a type, after the budget raised the setting if it had to.
        costs: Flops of one Newton-Schulz step of all matrices of each type; ``None`` if unknown.
        weights: Factor by which the error of each type counts: its share in the whole update's
            squared norm (``measured``), or 1 (``paper``).
        curves: Errors of each type at ``min_steps`` to ``max_steps`` steps.
        allocation: Planned steps of each type.
    """

    planner: str
    operator_types: tuple[str, ...]
    base_steps: int
    base_ell: float
    budget: int
    min_steps: int
    max_steps: int
    costs: tuple[int, ...] | None
    weights: tuple[float, ...]
    curves: tuple[ErrorCurve, ...]
    allocation: tuple[int, ...]

    def __str__(self) -> str:
        """Table beside the uniform schedule: ``ell``, steps, error and flops of each type.

        Errors are root mean squares over the sampled matrices in a measured plan.
        """
        base, is_measured = self.base_steps, self.planner == "measured"
        word, unit = ("distance", "flops") if is_measured else ("projected error", "steps")
        before, after = (
            [f"{math.sqrt(error) if is_measured else error:.4f}" for error in errors]
            for errors in (self.uniform_errors, self.errors)
        )
        columns = [
            ["operator type", *self.operator_types, "total"],
            ["ell target", *(f"{ell:.5e}" for ell in self.ell_target), ""],
            ["steps before", *(str(base) for _ in self.curves), str(base * len(self.curves))],
            ["after", *map(str, self.allocation), str(sum(self.allocation))],
            [f"{word} before", *before, ""],
            ["after", *after, ""],
        ]
        if self.costs is not None:
            pairs = zip(self.allocation, self.costs, strict=True)
            flops = [(steps - base) * cost / 1e9 for steps, cost in pairs]
            columns.append(["NS Gflop/step", *(f"{x:+.4g}" for x in (*flops, sum(flops)))])
        widths = [max(map(len, column)) for column in columns]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
            for row in zip(*columns, strict=True)
        ]
        lines.append(
            f"{self.planner} objective {self.objective:.5f}, of the uniform schedule "
            f"{self.uniform_objective:.5f}; budget {self.budget} {unit}"
        )
        return "\n".join(lines)

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

    def steps_and_ells_at(self, progress: Fraction) -> StepsAndElls:
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
        """Read what ``to_json`` wrote.

        Raises:
            ValueError: The text is not JSON, or not that of a plan.
        """
        try:
            plan = cls.from_dict(json.loads(text))
            plan._check_form()
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as e:
            raise ValueError(f"plan: found other text ({e!r}), expected a plan as JSON") from None
        return plan

    def _check_form(self) -> None:
        """Refuse what no planner makes, such as a plan that somebody has edited."""
        fields = ("planner", "base_steps", "base_ell", "min_steps", "max_steps")
        AMOConfig(**{name: getattr(self, name) for name in fields})  # which checks them
        low, high, steps = self.min_steps, self.max_steps, self.allocation
        costs = steps if self.costs is None else self.costs
        "".join(self.operator_types)  # fails for what is no name, and `fsum` for what is no number
        for curve in self.curves:
            math.fsum([self.budget, *self.weights, *costs, curve.uniform, *curve[0], *curve[1]])
        lists = (self.operator_types, self.weights, self.curves, steps, costs)
        sizes = {len(part) for curve in self.curves for part in curve[:2]}
        is_whole = len({*map(len, lists)}) == 1 and sizes == {high - low + 1}
        if not is_whole or not low <= min(steps) <= max(steps) <= high:
            fail("allocation", steps, f"{low} to {high} for each type and entry of its curve")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        """The plan of JSON values, as ``dataclasses.asdict`` gives them.

        Raises:
            TypeError: A field is missing or unknown.
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


def plan_range(config: AMOConfig, num_types: int = 1) -> tuple[int, int]:
    """Fewest and most steps that a plan may give an operator type.

    Args:
        config: Planner, budget and range of steps.
        num_types: Number of operator types, for ``paper``: its range is widened as far as the
            budget needs it.
    """
    low, high, base = config.min_steps, config.max_steps, config.base_steps
    if config.planner == "paper":
        total = allocate.step_budget(config.budget_ratio, num_types, base)
        return min(low, max(total // num_types, 1)), max(high, -(-total // num_types))
    low = min(low, max(math.floor(allocate.exact_ratio(config.budget_ratio) * base), 1))
    if config.budget_ratio >= 1:
        low, high = min(low, base), max(high, base)  # no plan may be worse than uniform
    return low, high


def budget_of(config: AMOConfig, costs: Sequence[int]) -> int:
    """The budget of a plan: flops, or steps for ``paper``.

    Args:
        config: Planner, budget and range of steps.
        costs: Flops of one step of all matrices of each type.

    Raises:
        ValueError: Even one step of every type is over the budget.
    """
    if config.planner == "paper":
        least = len(costs)
        budget = allocate.step_budget(config.budget_ratio, least, config.base_steps)
    else:
        least = sum(costs)
        budget = allocate.flop_budget(config.budget_ratio, costs, config.base_steps)
    if budget < least:
        fail("budget", budget, f"at least {least}, one step of every operator type")
    return budget


def candidate_settings(config: AMOConfig) -> tuple[tuple[int, float], ...]:
    """Numbers of steps, each with every ``ell``, whose errors an observation measures.

    None for ``paper``. The uniform schedule is always among them.
    """
    if config.planner == "paper":
        return ()
    low, high = plan_range(config)
    steps, ells = {*range(low, high + 1), config.base_steps}, {*GRID, config.base_ell}
    return tuple((k, ell) for k in sorted(steps) for ell in sorted(ells))


def best_curve(config: AMOConfig, errors: Sequence[float]) -> ErrorCurve:
    """The ``ell`` of least error for each number of steps; ties go to the greater.

    Args:
        config: Settings of `candidate_settings`.
        errors: Mean error of each candidate. Empty where no matrix was valid: errors are then those
            of singular values that are all at ``base_ell``, without the exact norm.
    """
    low, high = plan_range(config)
    uniform, steps = (config.base_steps, config.base_ell), range(low, high + 1)
    if not errors:
        worst = error_curve(times_safety(config.base_ell), {*steps, config.base_steps})
        squares = {k: error * error for k, error in worst.items()}
        ells = (config.base_ell,) * len(steps)
        return ErrorCurve(ells, tuple(squares[k] for k in steps), squares[config.base_steps])
    error_of = dict(zip(candidate_settings(config), errors, strict=True))
    best = [
        min((error, -ell) for (count, ell), error in error_of.items() if count == k) for k in steps
    ]
    least, negatives = zip(*best, strict=True)
    return ErrorCurve(tuple(-ell for ell in negatives), least, error_of[uniform])


def make_plan(
    config: AMOConfig,
    curves: Mapping[str, ErrorCurve],
    weights: Sequence[float],
    costs: Sequence[int] | None,
) -> Plan:
    """Divide the budget by the errors of each type, as the planner of the settings does it.

    Where the budget allows the uniform schedule, the objective of a measured plan is at most that
    one's. A pure function of its arguments, the same bits on every machine.

    Args:
        config: Planner, budget and range of steps.
        curves: Errors of each operator type, in the declared order of types.
        weights: Factor by which the error of each type counts; see `Plan`.
        costs: Flops of one Newton-Schulz step of each type; may be unknown for ``paper``.

    Raises:
        ValueError: The budget is infeasible.
    """
    units = costs or (1,) * len(curves)
    budget, (low, high) = budget_of(config, units), plan_range(config, len(curves))
    weighted = [
        dict(enumerate((weight * error for error in curve.errors), low))
        for curve, weight in zip(curves.values(), weights, strict=True)
    ]
    if config.planner == "paper":
        allocation = allocate.greedy(weighted, budget, config.base_steps)
    else:
        allocation = allocate.least_error(weighted, budget, units)
    plan = Plan(
        planner=config.planner,
        operator_types=tuple(curves),
        base_steps=config.base_steps,
        base_ell=float(config.base_ell),
        budget=budget,
        min_steps=low,
        max_steps=high,
        costs=None if costs is None else tuple(costs),
        weights=tuple(weights),
        curves=tuple(curves.values()),
        allocation=allocation,
    )
    may_be_uniform = config.planner == "measured" and config.budget_ratio >= 1
    assert not may_be_uniform or plan.objective <= plan.uniform_objective
    return plan


def plan_paper(
    config: AMOConfig, ell_target: Mapping[str, float], costs: Sequence[int] | None = None
) -> Plan:
    """Plan as the paper does, by the error that schedules leave at one singular value of each type.

    Args:
        config: Budget and range of steps.
        ell_target: Target of each operator type, in (0, 1].
        costs: Flops of one Newton-Schulz step of each type, in their declared order; for reports.

    Raises:
        ValueError: A target is out of range, or the budget is infeasible.
    """
    names = sort_operator_types(ell_target)
    low, high = plan_range(config, len(names))
    uniform = schedule_for(config.base_ell, config.base_steps)
    curves: dict[str, ErrorCurve] = {}
    for name in names:
        ell = float(ell_target[name])
        errors = tuple(error_curve(times_safety(ell), range(low, high + 1)).values())
        lowest = times_safety(min(ell, config.base_ell))
        curves[name] = ErrorCurve((ell,) * len(errors), errors, 1.0 - uniform.image(lowest))
    return make_plan(config, curves, (1.0,) * len(names), costs)


def shrunk(config: AMOConfig, ell_robust: float) -> float:
    """Target of the paper, ``shrinkage * ell + (1 - shrinkage) * base_ell``, rounded once."""
    alpha = allocate.exact_ratio(config.shrinkage)
    return float(alpha * Fraction(ell_robust) + (1 - alpha) * Fraction(config.base_ell))


def _round_toward(value: Fraction, end: int) -> int:
    """The nearest integer; of two, the one that is nearer to the end."""
    half = Fraction(1, 2)
    return math.floor(value + half) if value <= end else math.ceil(value - half)


def _round_to_sum(values: Sequence[Fraction]) -> list[int]:
    """Integers that sum to the rounded sum, by largest remainder; ties to the earlier."""
    counts = [math.floor(value) for value in values]
    by_remainder = sorted(range(len(values)), key=lambda i: (counts[i] - values[i], i))
    for i in by_remainder[: allocate.round_half_up(sum(values, Fraction(0))) - sum(counts)]:
        counts[i] += 1
    return counts


def remarks(plan: Plan, config: AMOConfig) -> list[str]:
    """Lines for the log on a plan that departs from the settings, or starves a type."""
    lines = starved(plan)
    if (plan.min_steps, plan.max_steps) != (config.min_steps, config.max_steps):
        limits = f"{config.min_steps} to {config.max_steps}"
        wider = f"{plan.min_steps} to {plan.max_steps}"
        lines.append(f"budget or uniform schedule need {wider} steps per type, beyond {limits}")
    return lines


def starved(plan: Plan) -> list[str]:
    """One line if a plan of the paper's planner gives types fewer steps than easier ones get."""
    types = list(zip(plan.ell_target, plan.allocation, plan.operator_types, strict=True))
    names = [
        name
        for ell, steps, name in types
        if any(easier > ell and more > steps for easier, more, _ in types)
    ]
    if plan.planner != "paper" or not names:
        return []
    return [f"the plan gives {', '.join(names)} fewer steps than an easier type gets"]
