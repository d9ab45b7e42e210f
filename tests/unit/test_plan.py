"""Plans: within the budget, the best, never worse than uniform; their way there, their text."""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import os
import random
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from amo_dist.config import AMOConfig
from amo_dist.schedule import plan as plans
from amo_dist.schedule.allocate import least_error
from amo_dist.schedule.plan import ErrorCurve, Plan, best_curve, plan_paper, starved
from amo_dist.schedule.polar_express import error_curve, schedule_for
from amo_dist.schedule.source import Amo
from amo_dist.schedule.types import MatrixInfo, Measurement, Schedule
from tests.examples import ROOT
from tests.sources import MEASURED, distance, plan_of, planned

# Powers round otherwise than products, and a schedule that maps 1 close to 0 multiplies what is
# lost there: a few times 1e-12 were seen.
ROUNDING = 1e-10
EXAMPLES = int(os.environ.get("AMO_EXAMPLES", "10"))
"""Cases of the property of measured plans."""


class Case:
    """A run up to its plan; singular values of each matrix at each of two observations."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        low = draw.randint(1, 6)
        self.config = AMOConfig(
            observe_until=2,
            observe_every=1,
            budget_ratio=draw.randint(50, 140) / 100,
            min_steps=low,
            max_steps=low + draw.randint(0, 4),
            base_steps=draw.randint(1, 8),
            base_ell=draw.choice([1e-3, 2e-3, 3e-3, 0.2]),
            sample_size=draw.randint(1, 4),
            update_norm=draw.choice(["as_is", "exact"]),
        )
        self.registry, self.spectra = list[MatrixInfo](), dict[str, list[list[float]]]()
        num_types = draw.randint(1, 8)
        for i in range(draw.randint(1, 12)):
            shape = draw.choice((1, 2, 3, 5, 8, 16)), draw.choice((1, 2, 3, 5, 8, 16))
            kind = draw.choice(("attn_q", "attn_v", "mlp_down", *"abcde")[:num_types])
            rate = draw.choice([1.0, 0.2 * math.sqrt(max(shape)), draw.uniform(0, 3), 0.0])
            self.registry.append(MatrixInfo(f"layers.{i % 5}.{kind}.{i}", shape, kind, rate))
            name = self.registry[-1].name
            self.spectra[name] = [singular_values(draw, min(shape)) for _ in range(2)]
        self.weights = {m.name: m.rate**2 * min(m.shape) for m in self.registry}

    def distance(self, name: str, observation: int, schedule: Schedule) -> float:
        sigmas = self.spectra[name][observation]
        return distance(sigmas, schedule, self.config.update_norm == "exact")

    def observed(self, registry: Sequence[MatrixInfo]) -> Amo:
        """A source after its observations and plan, for the registry in any order."""
        source = Amo(self.config)
        source.bind(registry)
        tried, self.samples = source.candidates(), list[Sequence[str]]()
        for i, step in enumerate((1, 2)):
            self.samples.append(source.sample(step))
            rows = {}
            for name in self.samples[i]:
                sigmas = self.spectra[name][i]
                # No kernel finds less than rounding.
                ell = max(sigmas[-1] / math.hypot(*sigmas), 1e-12)
                errors = [self.distance(name, i, one) for one in tried]
                rows[name] = Measurement(ell, False, errors)
            source.record(step, rows)
        return source

    def loss(self, schedules: Mapping[str, Schedule]) -> float:
        """The objective of any choice by type, from singular values."""
        total, whole = 0.0, sum(self.weights.values())
        for kind, schedule in schedules.items():
            members = {m.name for m in self.registry if m.operator_type == kind}
            weight = sum(self.weights[name] for name in members)
            share = weight / whole if whole else 1 / len(schedules)
            for i, sample in enumerate(self.samples):
                weights = {name: self.weights[name] for name in members.intersection(sample)}
                if not any(weights.values()):
                    weights = dict.fromkeys(weights, 1.0)
                errors = (w * self.distance(name, i, schedule) for name, w in weights.items())
                total += share * sum(errors) / sum(weights.values()) / 2
        return total


def singular_values(draw: random.Random, size: int) -> list[float]:
    """On a logarithmic scale, in clusters, or with zeros among them."""
    lowest, kind = draw.choice([-0.1, -1, -3, -6, -9]), draw.randrange(4)
    sigmas = [10 ** draw.uniform(lowest, 0) for _ in range(size)]
    if kind == 0:
        sigmas = [sigmas[i // 3] for i in range(size)]
    elif kind == 1:
        sigmas[1:] = [sigma * draw.choice([0, 1]) for sigma in sigmas[1:]]
    return sorted((sigma * 10 ** draw.uniform(-3, 3) for sigma in sigmas), reverse=True)


@settings(max_examples=EXAMPLES)
@given(seed=st.integers(0, 2**40))
def test_a_measured_plan_is_within_its_budget_and_never_worse_than_uniform(seed: int) -> None:
    case, costs = Case(seed), dict[str, int]()
    config = case.config
    for one in case.registry:
        short, long = sorted(one.shape)
        flops = 2 * short * short * (2 * long + short)
        costs[one.operator_type] = costs.get(one.operator_type, 0) + flops
    ceiling = Fraction(str(config.budget_ratio)) * config.base_steps * sum(costs.values())
    if ceiling < sum(costs.values()):
        with pytest.raises(ValueError, match="budget"):
            Amo(config).bind(case.registry)
        return
    source = case.observed(case.registry)
    plan = source.plan
    assert plan is not None
    flops_by_type = [costs[name] for name in plan.operator_types]
    assert sum(map(operator.mul, plan.allocation, flops_by_type)) <= ceiling
    errors = [
        {k: weight * error for k, error in enumerate(curve.errors, plan.min_steps)}
        for weight, curve in zip(plan.weights, plan.curves, strict=True)
    ]
    assert plan.allocation == least_error(errors, math.floor(ceiling), flops_by_type)
    if config.budget_ratio >= 1:
        assert plan.min_steps <= config.base_steps <= plan.max_steps
        assert plan.objective <= plan.uniform_objective
    assert plan.objective == pytest.approx(case.loss(source.schedules(10**6)), abs=ROUNDING)
    uniform = dict.fromkeys(costs, schedule_for(config.base_ell, config.base_steps))
    assert plan.uniform_objective == pytest.approx(case.loss(uniform), abs=ROUNDING)
    assert not starved(plan)
    assert Plan.from_json(plan.to_json()) == plan
    assert case.observed(case.registry[::-1]).plan == plan  # in any order of the registry


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"base_steps": 1}, (1, 7)),
        ({"base_steps": 12}, (3, 12)),
        ({"budget_ratio": 0.4}, (2, 7)),
        ({"budget_ratio": 0.2}, (1, 7)),
    ],
)
def test_the_range_is_relaxed_as_far_as_needed(
    fields: dict[str, Any], expected: tuple[int, int]
) -> None:
    config = AMOConfig(**fields)
    plan = plan_of(config, {"attn_q": 1e-5, "mlp_up": 0.3})
    assert (plan.min_steps, plan.max_steps) == expected
    assert sum(plan.allocation) * 10 <= plan.budget
    assert len(plans.remarks(plan, config)) == 1


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [(1.0, (3, 7)), (0.6, (3, 7)), (0.58, (2, 7)), (0.2, (1, 7)), (1.42, (3, 8))],
)
def test_the_papers_range_is_relaxed_no_farther_than_needed(
    ratio: float, expected: tuple[int, int]
) -> None:
    assert plans.plan_range(AMOConfig.paper(budget_ratio=ratio), 7) == expected


def test_the_best_ell_of_each_number_of_steps_and_ties_to_the_greater() -> None:
    config = AMOConfig(base_ell=2e-3)
    tried = plans.candidate_settings(config)
    # Ten a decade, to three digits; 2e-3 is one of them.
    grid = {float(f"{10 ** (i / 10):.3g}e{power}") for power in range(-5, -1) for i in range(10)}
    assert sorted(tried) == [(k, ell) for k in range(3, 8) for ell in sorted({*grid, 0.1})]
    errors = [random.Random(f"{steps} {ell}").random() for steps, ell in tried]
    curve = best_curve(config, errors)
    for i, k in enumerate(range(3, 8)):
        found = {ell: e for (steps, ell), e in zip(tried, errors, strict=True) if steps == k}
        assert curve.errors[i] == found[curve.ells[i]] == min(found.values())
    assert curve.uniform == errors[tried.index((5, 2e-3))]
    assert best_curve(config, [0.5] * len(tried)).ells == (0.1,) * 5


def test_a_type_never_seen_counts_as_if_all_were_at_the_base() -> None:
    curve = best_curve(AMOConfig(), [])
    worst = error_curve(1.01e-3, range(3, 8))
    assert curve == ErrorCurve((1e-3,) * 5, tuple(e * e for e in worst.values()), worst[5] ** 2)


# ---------------------------------------------------------------- the transition


@settings(max_examples=30)
@given(
    ells=st.lists(st.floats(-6, -0.5).map(lambda x: 10.0**x), min_size=1, max_size=9),
    ratio=st.sampled_from([0.3, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.7]),
    duration=st.integers(1, 23),
)
def test_totals_advance_monotonically_and_counts_stay_near(
    ells: list[float], ratio: float, duration: int
) -> None:
    plan = plan_paper(
        AMOConfig.paper(budget_ratio=ratio), {f"t{i}": ell for i, ell in enumerate(ells)}
    )
    totals = [5 * len(ells)]
    for done in range(1, duration + 1):
        p = Fraction(done, duration)
        exact = [5 + p * (k - 5) for k in plan.allocation]
        counts = [steps for steps, _ in plan.steps_and_ells_at(p).values()]
        assert all(math.floor(x) <= k <= math.ceil(x) for k, x in zip(counts, exact, strict=True))
        assert sum(counts) == math.floor(sum(exact) + Fraction(1, 2))
        totals.append(sum(counts))
    assert totals == sorted(totals, reverse=plan.budget < totals[0])
    assert (totals[-1], tuple(counts)) == (plan.budget, plan.allocation)


@settings(max_examples=40)
@given(start=st.integers(1, 9), end=st.integers(3, 7), duration=st.integers(1, 40))
@example(start=5, end=4, duration=10)
def test_no_type_of_a_measured_plan_turns_back(start: int, end: int, duration: int) -> None:
    plan = plan_of(AMOConfig(), {"a": 1e-3})
    plan = dataclasses.replace(plan, base_steps=start, allocation=(end,))
    states = [plan.steps_and_ells_at(Fraction(u, duration))["a"] for u in range(duration + 1)]
    counts = [steps for steps, _ in states]
    assert counts == sorted(counts, reverse=start > end)
    assert (counts[0], counts[-1]) == (start, end)
    low, high = Fraction(plan.base_ell), Fraction(plan.ell_target[0])
    for u, (count, ell) in enumerate(states):
        p = Fraction(u, duration)
        exact = start + p * (end - start)
        rounding = abs(count - exact)
        assert rounding <= Fraction(1, 2)
        assert rounding < Fraction(1, 2) or abs(end - count) < abs(end - exact)
        assert ell == float(low + p * (high - low))


def test_largest_remainder_ties_go_to_the_earlier_type() -> None:
    plan = plan_paper(AMOConfig.paper(), {"a": 1e-6, "b": 1e-6, "c": 0.5, "d": 0.5})
    assert plan.allocation == (7, 7, 3, 3)
    # 5.5, 5.5, 4.5, 4.5 sum to 20: two of the four are rounded up.
    assert [steps for steps, _ in plan.steps_and_ells_at(Fraction(1, 4)).values()] == [6, 6, 4, 4]


# ---------------------------------------------------------------- words


def test_a_plan_that_starves_hard_types_warns() -> None:
    golden = json.loads((ROOT / "tests/golden/locked_schedules.json").read_text())["Qwen3-1.7B"]
    targets = {name: row["ell_target"] for name, row in golden.items()}
    config = AMOConfig.paper(budget_ratio=0.6857)
    plan = plan_paper(config, targets)
    (line,) = starved(plan)
    assert line in plans.remarks(plan, config)
    hardest = min(targets, key=lambda name: targets[name])
    assert hardest in line
    assert starved(plan_paper(AMOConfig.paper(), {"a": 1e-4, "b": 0.5})) == []


def test_other_text_is_no_plan() -> None:
    plan = planned(MEASURED).plan
    assert plan is not None
    text = plan.to_json()
    broken = [text.replace('"curves": [', x) for x in ('"x": [', '"curves": [0, ')]
    for other in ("", "{", "3", "{}", "[]", *broken):
        with pytest.raises(ValueError, match="plan: found"):
            Plan.from_json(other)
