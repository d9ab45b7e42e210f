"""Plans of least measured residual: never above uniform's, within the budget, and the best."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amo_dist.config import AMOConfig
from amo_dist.schedule.amo import AMOPolicy
from amo_dist.schedule.grouping import matrices_by_group
from amo_dist.schedule.plan import Plan
from amo_dist.schedule.plan_table import starved
from amo_dist.schedule.planning import plan_allocation, plan_measured
from amo_dist.schedule.polar_express import compose
from amo_dist.schedule.trials import GRID, Measured, Trials
from amo_dist.schedule.types import MatrixInfo
from tests import spectra

GRANULARITIES = ("operator_type", "layer_group", "shape", "matrix")
TIMES: dict[str, Any] = {"observe_until": 2, "observe_every": 1, "transition_steps": 2}
# Powers round otherwise than products, and a schedule that maps 1 close to 0 multiplies what is
# lost there: a few times 1e-12 were seen.
ROUNDING = 1e-10
Spectra = Mapping[str, list[list[float]]]
"""Singular values of each matrix at each observation."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A run up to its plan."""

    config: AMOConfig
    registry: Sequence[MatrixInfo]
    spectra: Spectra


def singular_values(generator: random.Random, size: int) -> list[float]:
    """On a logarithmic scale, in clusters, or with zeros among them."""
    lowest = generator.choice([-0.1, -1, -3, -6, -9])
    sigmas = [10 ** generator.uniform(lowest, 0) for _ in range(size)]
    kind = generator.randrange(4)
    if kind == 0:
        sigmas = [sigmas[i // 3] for i in range(size)]
    elif kind == 1:
        sigmas[1:] = [sigma * generator.choice([0, 1]) for sigma in sigmas[1:]]
    return sorted((sigma * 10 ** generator.uniform(-3, 3) for sigma in sigmas), reverse=True)


def registry_of(generator: random.Random, num_matrices: int, num_types: int) -> list[MatrixInfo]:
    sizes = (1, 2, 3, 5, 8, 16)
    registry = []
    for i in range(num_matrices):
        rows, columns = generator.choice(sizes), generator.choice(sizes)
        shape = (rows, rows) if generator.random() < 0.3 else (rows, columns)
        kind = ("attn_q", "attn_v", "mlp_down", *"abcde")[generator.randrange(num_types)]
        registry.append(MatrixInfo(f"layers.{i % 5}.{kind}.{i}", shape, kind))
    return registry


@st.composite
def cases(draw: st.DrawFn) -> Case:
    low = draw(st.integers(1, 6))
    config = AMOConfig(
        **TIMES,
        budget_ratio=draw(st.integers(50, 140)) / 100,
        budget_unit=draw(st.sampled_from(["flops", "steps"])),
        granularity=draw(st.sampled_from(GRANULARITIES)),
        min_steps=low,
        max_steps=low + draw(st.integers(0, 4)),
        base_steps=draw(st.integers(1, 8)),
        base_ell=draw(st.sampled_from([1e-3, 2e-3, 3e-3, 0.2])),
        sample_size=draw(st.integers(1, 4)),
    )
    generator = random.Random(draw(st.integers(0, 2**40)))
    registry = registry_of(generator, draw(st.integers(1, 12)), draw(st.integers(1, 8)))
    found = {
        each.name: [singular_values(generator, min(each.shape)) for _ in range(2)]
        for each in registry
    }
    return Case(config, registry, found)


def ell_of(sigmas: Sequence[float]) -> float:
    """As of a kernel, which finds no less than rounding."""
    return max(sigmas[-1] / math.hypot(*sigmas), 1e-12)


def observed(case: Case, registry: Sequence[MatrixInfo]) -> AMOPolicy:
    """All observations, told in the order of a registry."""
    policy = AMOPolicy(case.config)
    policy.bind(registry)
    trials = policy.trials()
    for i, step in enumerate((1, 2)):
        sample = set(policy.sample(step))
        sigmas = {m.name: case.spectra[m.name][i] for m in registry if m.name in sample}
        ells = {name: ell_of(values) for name, values in sigmas.items()}
        errors = {name: spectra.errors_left(trials, values) for name, values in sigmas.items()}
        policy.record(step, ells, errors)
    return policy


def residual(sigmas: Sequence[float], ell: float, steps: int) -> float:
    """What the schedule leaves of a matrix, in plain Python."""
    norm, total = 1.01 * math.hypot(*sigmas), 0.0
    for sigma in sigmas:
        x = sigma / norm
        for a, b, c in compose(min(1.01 * ell, 1.0), steps):
            x = a * x + b * x**3 + c * x**5
        total += (x * x - 1) ** 2
    return total / len(sigmas)


def loss(case: Case, policy: AMOPolicy, chosen: Mapping[str, tuple[int, float]]) -> float:
    """The objective of any choice, from singular values."""
    total = 0.0
    samples = [policy.sample(1), policy.sample(2)]
    for group, members in matrices_by_group(case.registry, case.config.granularity).items():
        steps, ell = chosen[group]
        for i, sample in enumerate(samples):
            seen = [case.spectra[m.name][i] for m in members if m.name in sample]
            mean = sum(residual(sigmas, ell, steps) for sigmas in seen) / len(seen)
            total += len(members) * mean / 2
    return total


def flops(matrix: MatrixInfo) -> int:
    short, long = sorted(matrix.shape)
    return 2 * short * short * (2 * long + short)


def costs_of(case: Case) -> list[int]:
    """What a step of each group counts."""
    groups = matrices_by_group(case.registry, case.config.granularity).values()
    in_flops = case.config.budget_unit == "flops"
    return [sum(map(flops, members)) if in_flops else 1 for members in groups]


def ceiling(case: Case) -> Fraction:
    half = Fraction(1, 2) if case.config.budget_unit == "steps" else 0  # rounded half up
    ratio = Fraction(str(case.config.budget_ratio))
    return ratio * case.config.base_steps * sum(costs_of(case)) + half


@pytest.mark.slow
@settings(deadline=None, max_examples=1000)
@given(case=cases())
def test_a_plan_is_within_its_budget_and_never_worse_than_uniform(case: Case) -> None:
    config, costs = case.config, costs_of(case)
    if ceiling(case) < sum(costs):
        with pytest.raises(ValueError, match=r"budget: found \d+, expected at least"):
            AMOPolicy(config).bind(case.registry)
        return
    policy = observed(case, case.registry)
    state = json.loads(json.dumps(policy.state_dict()))
    text = policy.make_plan()
    plan = Plan.from_json(text)
    # The budget.
    assert sum(k * cost for k, cost in zip(plan.allocation, costs, strict=True)) <= ceiling(case)
    assert all(plan.min_steps <= k <= plan.max_steps for k in plan.allocation)
    # Never worse than uniform, at the same budget or above it.
    fits = config.base_steps * sum(costs) <= ceiling(case)
    if config.budget_ratio >= 1:
        assert fits
        assert plan.min_steps <= config.base_steps <= plan.max_steps
    if fits and plan.min_steps <= config.base_steps <= plan.max_steps:
        assert plan.objective <= plan.uniform_objective
    # Both objectives are those of the spectra.
    chosen = zip(plan.allocation, plan.ell_target, strict=True)
    planned = dict(zip(plan.operator_types, chosen, strict=True))
    assert plan.objective == pytest.approx(loss(case, policy, planned), abs=ROUNDING)
    uniform = dict.fromkeys(planned, (config.base_steps, config.base_ell))
    found = loss(case, policy, uniform)
    assert plan.uniform_objective == pytest.approx(found, abs=ROUNDING)
    # Text, state and order.
    assert plan.to_json() == text
    assert not starved(plan)
    resumed = AMOPolicy(config)
    resumed.load_state_dict(state)
    resumed.bind(case.registry[::-1])
    assert resumed.state_dict() == state
    assert resumed.make_plan() == text
    assert observed(case, case.registry[::-1]).make_plan() == text


# ---------------------------------------------------------------- a slow twin


@settings(deadline=None, max_examples=60)
@given(case=cases(), num_groups=st.integers(1, 4))
def test_the_plan_is_that_of_a_search_of_everything(case: Case, num_groups: int) -> None:
    """Each group has one matrix, so that nothing but planning is left."""
    kinds = ("attn_q", "attn_k", "mlp_up", "router")
    registry = [
        MatrixInfo(f"{kind}.0", (3 + i, 9), kind) for i, kind in enumerate(kinds[:num_groups])
    ]
    generator = random.Random(repr(case.spectra))
    found = {m.name: [singular_values(generator, min(m.shape))] * 2 for m in registry}
    config = dataclasses.replace(case.config, granularity="operator_type")
    case = Case(config, registry, found)
    if ceiling(case) < sum(costs_of(case)):
        return
    plan = Plan.from_json(observed(case, registry).make_plan())
    ells = sorted({*GRID, config.base_ell}, reverse=True)
    steps = range(plan.min_steps, plan.max_steps + 1)
    by_name = {m.operator_type: found[m.name][0] for m in registry}
    curves = []
    for kind in plan.operator_types:
        pairs = [min((residual(by_name[kind], ell, k), -ell) for ell in ells) for k in steps]
        curves.append(dict(zip(steps, pairs, strict=True)))
    costs = dict(zip(matrices_by_group(registry), costs_of(case), strict=True))
    best = min(
        math.fsum(curve[k][0] for curve, k in zip(curves, choice, strict=True))
        for choice in itertools.product(steps, repeat=num_groups)
        if sum(k * costs[t] for k, t in zip(choice, plan.operator_types, strict=True))
        <= ceiling(case)
    )
    assert plan.objective == pytest.approx(best, abs=ROUNDING)
    for curve, errors in zip(curves, plan.curves, strict=True):
        assert errors == pytest.approx([curve[k][0] for k in steps], abs=ROUNDING)
    # Of the allocation itself, whatever ties there are.
    planned = zip(curves, plan.allocation, strict=True)
    assert math.fsum(curve[k][0] for curve, k in planned) == pytest.approx(best, abs=ROUNDING)


# ---------------------------------------------------------------- edges

TRIALS = Trials(range(3, 8), 5, 1e-3)


def measured_of(ell: float, trials: Trials = TRIALS) -> Measured:
    return trials.best(spectra.errors_left(trials.schedules(), spectra.spectrum(ell)))


def plan_of(config: AMOConfig, ells: Mapping[str, float], costs: Mapping[str, int]) -> Plan:
    registry = [MatrixInfo(f"layers.0.{kind}", (4, 4), kind) for kind in ells]
    policy = AMOPolicy(config)
    policy.bind(registry)
    schedules = policy.trials()
    steps = sorted({schedule.num_steps for schedule in schedules})
    trials = Trials(range(steps[0], steps[-1] + 1), config.base_steps, config.base_ell)
    measured = {kind: measured_of(ell, trials) for kind, ell in ells.items()}
    return plan_measured(
        config,
        measured,
        num_matrices=dict.fromkeys(ells, 1),
        ell_robust=tuple(sorted(ells.values())),
        costs=costs,
    )


HARD_AND_EASY = {"attn_q": 1e-5, "mlp_up": 0.3}
ALIKE = dict.fromkeys(HARD_AND_EASY, 10)


@pytest.mark.parametrize("base_steps", [1, 2, 8, 12])
@pytest.mark.parametrize("unit", ["flops", "steps"])
def test_the_uniform_schedule_is_a_candidate_outside_of_the_range(
    base_steps: int, unit: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = AMOConfig(base_steps=base_steps, budget_unit=unit)
    plan = plan_of(config, HARD_AND_EASY, ALIKE)
    assert (plan.min_steps, plan.max_steps) == (min(3, base_steps), max(7, base_steps))
    assert sum(plan.allocation) <= 2 * base_steps
    assert plan.objective <= plan.uniform_objective
    why = "the budget is infeasible within"
    if base_steps > 7:
        why = f"the {base_steps} steps of the uniform schedule are beyond"
    assert f"{why} 3 to 7 steps a type; the range becomes" in caplog.text


def test_one_group_takes_what_there_is() -> None:
    for ratio, expected in ((0.6, 3), (1.0, 5), (1.25, 6), (1.4, 7), (1e9, 7)):
        for unit in ("flops", "steps"):
            config = AMOConfig(budget_ratio=ratio, budget_unit=unit)
            plan = plan_of(config, {"attn_q": 1e-4}, {"attn_q": 7})
            assert plan.allocation == (expected,)


@pytest.mark.parametrize("unit", ["flops", "steps"])
def test_a_budget_without_end_gives_each_its_best(
    unit: str, caplog: pytest.LogCaptureFixture
) -> None:
    plan = plan_of(AMOConfig(budget_ratio=1e9, budget_unit=unit), HARD_AND_EASY, ALIKE)
    assert plan.measured is not None
    assert plan.errors == tuple(min(one.residuals) for one in plan.measured)
    assert (plan.min_steps, plan.max_steps) == (3, 7)
    assert not caplog.records
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(("ratio", "low"), [(0.4, 2), (0.25, 1), (0.2, 1)])
@pytest.mark.parametrize("unit", ["flops", "steps"])
def test_a_small_budget_relaxes_the_range_and_says_so(
    ratio: float, low: int, unit: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = AMOConfig(budget_ratio=ratio, budget_unit=unit)
    plan = plan_of(config, HARD_AND_EASY, ALIKE)
    assert (plan.min_steps, plan.max_steps) == (low, 7)
    assert f"the range becomes {low} to 7" in caplog.text
    assert sum(plan.allocation) * 10 <= (1 if unit == "flops" else 10) * plan.budget


def test_hundreds_of_matrices_are_groups_of_their_own() -> None:
    """Too many for the least error under flops, perhaps, but never worse than uniform."""
    generator = random.Random(0)
    registry = [
        MatrixInfo(f"layers.{i}.w", (8, 8 + generator.randrange(400)), "mlp_up") for i in range(300)
    ]
    found = {m.name: [singular_values(generator, 8)] * 2 for m in registry}
    for unit in ("flops", "steps"):
        config = AMOConfig(**TIMES, granularity="matrix", budget_unit=unit)
        case = Case(config, registry, found)
        plan = Plan.from_json(observed(case, registry).make_plan())
        assert len(plan.operator_types) == 300
        assert plan.objective < 0.9 * plan.uniform_objective
        by_group = dict(zip(matrices_by_group(registry, "matrix"), costs_of(case), strict=True))
        pairs = zip(plan.operator_types, plan.allocation, strict=True)
        spent = sum(k * by_group[name] for name, k in pairs)
        assert 0.99 * ceiling(case) < spent <= ceiling(case)


def test_uniform_is_taken_where_the_search_ends_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    worst = (3, 3)
    monkeypatch.setattr("amo_dist.schedule.planning.least_error", lambda *_: worst)
    plan = plan_of(AMOConfig(), HARD_AND_EASY, ALIKE)
    assert plan.allocation == (5, 5)
    # Not where it is too dear.
    assert plan_of(AMOConfig(budget_ratio=0.9), HARD_AND_EASY, ALIKE).allocation == worst


def test_a_group_never_seen_gets_what_the_base_says() -> None:
    registry = [MatrixInfo(f"layers.{i}.{t}", (4, 4), t) for t in ("attn_q", "zz") for i in (0, 1)]
    policy = AMOPolicy(AMOConfig(**TIMES))
    policy.bind(registry)
    for step in (1, 2):
        ells = {name: math.nan if "zz" in name else 0.5 for name in policy.sample(step)}
        spectra.record(policy, step, ells)
    policy.adopt_plan(policy.make_plan())
    plan = policy.plan
    assert plan is not None
    assert plan.measured is not None
    assert plan.measured[1] == TRIALS.best(None)
    assert plan.ell_target[1] == 1e-3
    # What an easy type can spare goes to what may be as hard as the base.
    assert plan.allocation[1] >= 5 > plan.allocation[0]
    assert plan.objective <= plan.uniform_objective


def test_weights_are_matrices() -> None:
    """The type of many matrices wins what both want."""
    measured = {"attn_q": measured_of(1e-4), "mlp_up": measured_of(1e-4)}
    steps = {}
    for many in measured:
        plan = plan_measured(
            AMOConfig(budget_unit="steps"),
            measured,
            num_matrices={**dict.fromkeys(measured, 1), many: 50},
            ell_robust=(1e-4, 1e-4),
        )
        steps[many] = dict(zip(plan.operator_types, plan.allocation, strict=True))
        assert plan.weights == plan.num_matrices
        # What a type of few matrices gives is worth it: a measured plan starves none.
        assert starved(plan) == []
        assert starved(dataclasses.replace(plan, criterion="projected"))
    assert steps["attn_q"] == {"attn_q": 7, "mlp_up": 3}
    assert steps["mlp_up"] == {"attn_q": 3, "mlp_up": 7}


def test_each_objective_has_a_planner_of_its_own() -> None:
    with pytest.raises(ValueError, match="objective: found 'projected', expected 'measured'"):
        plan_measured(
            AMOConfig.paper(),
            {"a": measured_of(1e-4)},
            num_matrices={"a": 1},
            ell_robust=(1e-4,),
        )
    with pytest.raises(ValueError, match="objective: found 'measured', expected 'projected'"):
        plan_allocation(AMOConfig(budget_unit="steps"), {"a": 1e-4})
    with pytest.raises(ValueError, match="budget_unit: found 'flops', expected the shapes"):
        plan_measured(
            AMOConfig(), {"a": measured_of(1e-4)}, num_matrices={"a": 1}, ell_robust=(1e-4,)
        )


@pytest.mark.parametrize(
    "fields",
    [
        {"planner": "greedy"},
        {"planner": "greedy", "budget_unit": "steps"},
        {"planner": "greedy", "objective": "projected"},
    ],
)
def test_greedy_is_the_papers_alone(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="planner: found 'greedy', expected 'exact', or objective"):
        AMOConfig(**fields)
    assert AMOConfig.paper() == AMOConfig(
        objective="projected", planner="greedy", budget_unit="steps"
    )
    assert AMOConfig.paper(seed=3, planner="exact").to_dict() == {
        **AMOConfig().to_dict(),
        "objective": "projected",
        "budget_unit": "steps",
        "seed": 3,
    }
    with pytest.raises(ValueError, match="objective: found 'other', expected one of 'measured', "):
        AMOConfig(objective="other")
