"""How many Newton-Schulz steps each operator type gets, under a budget of steps or of flops.

Types are positions here: curves, costs and allocations are sequences in one common order, and
ties go to the earlier position. Ratios and flops are exact (``Fraction`` and ``int``), because
binary floating point puts half-way budgets on the wrong side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TypeAlias

Curve: TypeAlias = Mapping[int, float]
"""Projected error by number of steps."""

_GAIN = 1e-12
"""A transfer must gain more (float noise could cycle); closer costs than this count as equal."""

_MOST_STEPS = 100
"""No budget relaxes the range beyond this: the error is down to rounding long before."""


def ns_step_flops(m: int, n: int) -> int:
    """Floating-point operations of one Newton-Schulz step of one ``m x n`` matrix.

    Args:
        m: Rows, at least 1.
        n: Columns, at least 1.

    Returns:
        Flops of its three products, ``2 * min^2 * (2 * max + min)``; a multiply-add counts two.
    """
    short, long = min(m, n), max(m, n)
    return 2 * short * short * (2 * long + short)


def exact_ratio(ratio: float) -> Fraction:
    """A ratio as it was written: ``0.7`` becomes 7/10, not the nearest binary fraction.

    Raises:
        ValueError: It is not a finite number above zero.
    """
    is_real = isinstance(ratio, (int, float)) and not isinstance(ratio, bool)
    if not (is_real and math.isfinite(ratio) and ratio > 0):
        raise ValueError(f"budget_ratio: found {ratio!r}, expected a finite number > 0")
    return Fraction(str(ratio))


def round_half_up(value: Fraction) -> int:
    """The nearest integer; of two, the greater (the built-in ``round`` takes the even one)."""
    return math.floor(value + Fraction(1, 2))


def step_budget(ratio: float, num_types: int, base_steps: int) -> int:
    """The total of steps over all operator types, ``round_half_up(ratio * types * base)``.

    Args:
        ratio: Planned work over that of the uniform schedule; above 0.
        num_types: Number of operator types.
        base_steps: Steps of the uniform schedule.

    Raises:
        ValueError: ``ratio`` is not a finite number above zero.
    """
    return round_half_up(exact_ratio(ratio) * num_types * base_steps)


def flop_budget(ratio: float, costs: Sequence[int], base_steps: int) -> int:
    """The greatest total of flops that is within ``ratio * base_steps * sum(costs)``.

    Args:
        ratio: Planned work over that of the uniform schedule; above 0.
        costs: Flops of one step of all matrices of each type.
        base_steps: Steps of the uniform schedule.

    Raises:
        ValueError: ``ratio`` is not a finite number above zero.
    """
    return math.floor(exact_ratio(ratio) * base_steps * sum(costs))


def relax_range(
    budget: int,
    num_types: int,
    min_steps: int,
    max_steps: int,
    *,
    costs: Sequence[int] | None = None,
) -> tuple[int, int]:
    """Widen the range of steps a type may get, as far as the budget needs it and no farther.

    Args:
        budget: Total of steps, or with ``costs`` the most flops.
        num_types: Number of operator types.
        min_steps: Fewest steps asked for.
        max_steps: Most steps asked for.
        costs: Flops of one step of each type, for a budget of flops.

    Returns:
        The range ``(min_steps, max_steps)`` within which the budget can be met.

    Raises:
        ValueError: Even one step of every type is over the budget, or it takes more than 100.
    """
    one_step_each = num_types if costs is None else sum(costs)
    if budget < one_step_each:
        unit = "steps" if costs is None else "flops"
        raise ValueError(
            f"budget: found {budget} {unit}, expected at least {one_step_each}, "
            "one step of every operator type"
        )
    if costs is None and budget > max(max_steps, _MOST_STEPS) * num_types:
        raise ValueError(
            f"budget: found {budget} steps, expected at most {_MOST_STEPS} for each of the "
            f"{num_types} operator types"
        )
    low = min(min_steps, budget // one_step_each)
    # A budget of flops is a ceiling, so only the fewest steps can be infeasible.
    high = max(max_steps, -(-budget // num_types)) if costs is None else max_steps
    return low, high


def objective(curves: Sequence[Curve], allocation: Sequence[int]) -> float:
    """The summed projected error of an allocation, correctly rounded."""
    return math.fsum(curve[k] for curve, k in zip(curves, allocation, strict=True))


def allocate(
    curves: Sequence[Curve],
    budget: int,
    *,
    planner: str = "exact",
    base_steps: int = 5,
    costs: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Choose the number of steps of each operator type.

    Args:
        curves: For each type the projected error at every number of steps it may get. All have
            the same contiguous range of steps, and finite values.
        budget: Steps to hand out, exactly; with ``costs`` the most flops.
        planner: ``exact`` for the least summed error. Where greedy's answer is within 1e-12 of it,
            that one is returned, else the lexicographically smallest. ``greedy`` for the passes
            of the AMO paper (add, remove, transfer), which are optimal on convex curves only.
        base_steps: Where greedy starts.
        costs: Flops of one step of each type. With them the budget is one of flops, which only
            ``exact`` knows; equal errors go to the lexicographically smallest.

    Returns:
        The steps of each type, in the order of ``curves``.

    Raises:
        ValueError: An argument is malformed, or the budget infeasible (see ``relax_range``).
    """
    low, high = _check(curves, planner, costs)
    if costs is not None:
        if budget < low * sum(costs):
            raise ValueError(f"budget: found {budget}, expected at least {low * sum(costs)} flops")
        return _exact_flops(curves, costs, budget)
    if not low * len(curves) <= budget <= high * len(curves):
        raise ValueError(
            f"budget: found {budget}, expected {low * len(curves)} to {high * len(curves)} steps"
        )
    greedy = _greedy(curves, budget, base_steps)
    if planner == "greedy":
        return greedy
    exact = _exact_steps(curves, budget)
    is_optimal = objective(curves, greedy) - objective(curves, exact) <= _GAIN
    return greedy if is_optimal else exact


def _check(curves: Sequence[Curve], planner: str, costs: Sequence[int] | None) -> tuple[int, int]:
    """Validate what ``allocate`` was given; return the range of steps of the curves."""
    if planner not in ("exact", "greedy"):
        raise ValueError(f"planner: found {planner!r}, expected 'exact' or 'greedy'")
    if costs is not None and planner == "greedy":
        raise ValueError("planner: found 'greedy', expected 'exact' with a budget of flops")
    if costs is not None and (len(costs) != len(curves) or not all(c > 0 for c in costs)):
        raise ValueError(f"costs: found {costs!r}, expected {len(curves)} integers > 0")
    if not curves or not all(curves):
        raise ValueError("curves: found an empty one, expected an error for each number of steps")
    low, high = min(curves[0]), max(curves[0])
    for curve in curves:
        if sorted(curve) != list(range(low, high + 1)) or low < 1:
            raise ValueError(f"curves: found steps {sorted(curve)}, expected {low} to {high}")
        if not all(math.isfinite(error) for error in curve.values()):
            raise ValueError(f"curves: found {dict(curve)}, expected finite errors")
    return low, high


def _greedy(curves: Sequence[Curve], budget: int, base_steps: int) -> tuple[int, ...]:
    """The passes add, remove and transfer of the AMO paper; ties to the earlier type."""
    low, high = min(curves[0]), max(curves[0])
    everyone = range(len(curves))
    steps = [min(max(base_steps, low), high)] * len(curves)

    def gain(i: int) -> float:
        return curves[i][steps[i]] - curves[i][steps[i] + 1]

    def loss(j: int) -> float:
        return curves[j][steps[j] - 1] - curves[j][steps[j]]

    for _ in range(budget - sum(steps)):
        steps[max((i for i in everyone if steps[i] < high), key=gain)] += 1
    for _ in range(sum(steps) - budget):
        steps[min((j for j in everyone if steps[j] > low), key=loss)] -= 1
    while True:
        takers = [(i, gain(i)) for i in everyone if steps[i] < high]
        givers = [(j, loss(j)) for j in everyone if steps[j] > low]
        pairs = [(g - d, i, j) for i, g in takers for j, d in givers if i != j]
        best = max(pairs, key=lambda pair: pair[0], default=(0.0, 0, 0))
        if not best[0] > _GAIN:
            return tuple(steps)
        steps[best[1]] += 1
        steps[best[2]] -= 1


def _as_integers(curves: Sequence[Curve]) -> list[dict[int, int]]:
    """The same errors times one common power of two: sums and comparisons become exact."""
    ratios = [{k: float(e).as_integer_ratio() for k, e in curve.items()} for curve in curves]
    common = max(d for curve in ratios for _, d in curve.values())
    return [{k: n * (common // d) for k, (n, d) in curve.items()} for curve in ratios]


def _exact_steps(curves: Sequence[Curve], budget: int) -> tuple[int, ...]:
    """The allocation of least error whose steps sum to ``budget``; lexicographically smallest."""
    errors = _as_integers(curves)
    # tails[i][b]: least error of the types from i on, with b steps between them.
    tails: list[dict[int, int]] = [{0: 0}]
    for curve in reversed(errors):
        tail: dict[int, int] = {}
        for spent, error in tails[0].items():
            for k, more in curve.items():
                total = error + more
                if spent + k <= budget and total < tail.get(spent + k, total + 1):
                    tail[spent + k] = total
        tails.insert(0, tail)
    chosen: list[int] = []
    for i, curve in enumerate(errors):
        left, best = budget - sum(chosen), tails[i][budget - sum(chosen)]
        rest = tails[i + 1]
        chosen.append(
            min(k for k in curve if left - k in rest and curve[k] + rest[left - k] == best)
        )
    return tuple(chosen)


_Front: TypeAlias = list[tuple[int, int]]
"""Pairs (flops, error), flops rising and error strictly falling: none dominates another."""


def _exact_flops(curves: Sequence[Curve], costs: Sequence[int], budget: int) -> tuple[int, ...]:
    """The allocation of least error within ``budget`` flops; lexicographically smallest."""
    errors = _as_integers(curves)
    unit = math.gcd(*costs)
    units = [cost // unit for cost in costs]
    left = budget // unit
    low = min(curves[0])
    fronts: list[_Front] = [[(0, 0)]]
    for i in reversed(range(len(errors))):
        # The types before i take at least their fewest steps.
        fronts.insert(0, _extend(fronts[0], errors[i], units[i], left - low * sum(units[:i])))
    best = fronts[0][-1][1]
    chosen: list[int] = []
    for i, curve in enumerate(errors):
        for k in sorted(curve):
            rest = _least(fronts[i + 1], left - k * units[i])
            if rest is not None and curve[k] + rest == best:
                break
        chosen.append(k)
        left, best = left - k * units[i], best - curve[k]
    return tuple(chosen)


def _extend(front: _Front, curve: Mapping[int, int], cost: int, limit: int) -> _Front:
    """The front with one more type, up to ``limit`` flops."""
    points = sorted((f + k * cost, e + curve[k]) for f, e in front for k in curve)
    extended: _Front = []
    for flops, error in points:
        if flops <= limit and (not extended or error < extended[-1][1]):
            extended.append((flops, error))
    return extended


def _least(front: _Front, limit: int) -> int | None:
    """The least error a front reaches within ``limit`` flops; ``None`` where nothing fits."""
    within = [error for flops, error in front if flops <= limit]
    return within[-1] if within else None
