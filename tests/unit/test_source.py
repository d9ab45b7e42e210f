"""Sources of schedules: AMO's observations and phases, fixed tables, what a state restores."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amo_dist.config import AMOConfig, MuonConfig
from amo_dist.schedule.coefficients import named_schedule
from amo_dist.schedule.plan import shrunk
from amo_dist.schedule.polar_express import SAFETY, compose, schedule_for, simulate
from amo_dist.schedule.source import Amo, Fixed, as_source, draw
from amo_dist.schedule.types import Measurement, Schedule
from amo_dist.state.control import ScheduleState, control_record, restore, to_text
from tests.sources import ELL, MEASURED, PAPER, REGISTRY, TYPES, amo, observe, observed

BOTH = pytest.mark.parametrize("config", [PAPER, MEASURED], ids=["paper", "measured"])

# ---------------------------------------------------------------- drawing


def test_the_draw_is_pinned() -> None:
    """Another draw would observe other matrices after a resume on a new version."""
    names = [f"layers.{i}" for i in range(28)]
    drawn = draw(42, 150, "attn_q", names, 8)
    assert [int(name.split(".")[1]) for name in drawn] == [2, 6, 11, 12, 14, 15, 17, 26]


def test_the_draw_is_uniform_and_without_replacement() -> None:
    names = [f"n{i}" for i in range(10)]
    pairs = Counter(tuple(draw(7, step, "t", names, 2)) for step in range(1, 9001))
    assert len(pairs) == 45
    # 200 expected of each pair, standard deviation 14; 5 of those cover all 45 pairs.
    assert all(abs(count - 200) < 70 for count in pairs.values())
    assert draw(7, 1, "t", names[:2], 8) == names[:2]


# ---------------------------------------------------------------- AMO


@BOTH
def test_amo_from_the_first_step_to_the_lock(config: AMOConfig) -> None:
    source = amo(config)
    uniform = schedule_for(1e-3, 5)
    for step in range(1, 7):
        assert source.phase(step) == "observation"
        assert source.schedules(step) == dict.fromkeys(TYPES, uniform)
        sample = source.sample(step)
        assert bool(sample) == (step in (2, 4, 6))
        if sample:
            assert list(sample) == sorted(sample)
            kinds = Counter(name.rsplit(".", 1)[1] for name in sample)
            assert kinds == dict.fromkeys(TYPES, 3)
            observe(source, step)
    plan = source.plan
    assert plan is not None
    versions = [source.version(step) for step in range(6, 13)]
    assert versions == [3, 4, 5, 6, 7, 7, 7]
    for step in (7, 8, 9):
        assert source.phase(step) == "transition"
        assert source.steps_and_ells_at(step) == plan.steps_and_ells_at(Fraction(step - 6, 4))
    planned_state = dict(
        zip(TYPES, zip(plan.allocation, plan.ell_target, strict=True), strict=True)
    )
    for step in (10, 11, 10**9):
        assert source.phase(step) == "locked"
        assert source.steps_and_ells_at(step) == planned_state
        assert not source.sample(step)
    metrics = source.metrics(10)
    assert metrics.keys() == amo(config).metrics(1).keys()
    assert (metrics["amo/phase"], metrics["amo/observations"]) == (2.0, 3.0)
    assert metrics["amo/ns_steps/attn_q"] == plan.allocation[0]
    assert metrics["amo/ell/expert"] == 0.04 / SAFETY


def test_medians_of_medians_pass_over_invalid_observations() -> None:
    source = amo(AMOConfig.paper(observe_until=6, observe_every=2, sample_size=4))
    for step in (2, 4, 6):
        ells = dict.fromkeys(source.sample(step), 0.5)
        mine = [name for name in ells if name.endswith("attn_q")]
        values = [math.nan] * 4 if step == 4 else [0.5, 0.25, 0.125, 0.0625 * step]
        ells |= dict(zip(mine, values, strict=True))
        source.record(step, observed(source, ells))
    first, second, third = (one.ell["attn_q"] for one in source.observations)
    # The conventional median of an even count: the mean of the two in the middle.
    assert first == (0.25 / SAFETY + 0.125 / SAFETY) / 2
    assert second is None
    assert third == (0.25 / SAFETY + 0.375 / SAFETY) / 2
    plan = source.plan
    assert plan is not None
    assert plan.ell_target[0] == shrunk(source.config, (first + third) / 2)
    expected = Fraction("0.7") * Fraction((first + third) / 2) + Fraction("0.3") * Fraction(1e-3)
    assert plan.ell_target[0] == float(expected)


def test_invalid_matrices_are_left_out_counted_and_told() -> None:
    source = amo()
    ells = dict.fromkeys(source.sample(2), 0.5)
    mine = [name for name in ells if name.endswith("attn_q")]
    ells[mine[0]], ells[mine[1]], ells[mine[2]] = math.nan, math.nan, 0.25
    lines = source.record(2, observed(source, ells))
    (found,) = source.observations
    assert found.ell["attn_q"] == 0.25 / SAFETY
    assert found.num_sampled == dict.fromkeys(TYPES, 3)
    assert found.num_invalid == {"attn_q": 2, "mlp_down": 0, "expert": 0}
    assert lines == [f"step 2: no valid ell for {mine[0]}, {mine[1]}: left out"]
    source.record(4, {})  # of a step that was skipped
    assert source.observations[1].num_invalid == dict.fromkeys(TYPES, 3)


@BOTH
def test_a_type_without_valid_observation_falls_back(config: AMOConfig) -> None:
    source, lines = amo(config), []
    for step in (2, 4, 6):
        lines += observe(source, step, {**ELL, "expert": math.nan})
    assert "expert has no valid observation; it falls back to base_ell = 0.001" in lines
    assert source.plan is not None
    assert source.plan.ell_target[2] == 1e-3


def test_single_rows_have_ell_one() -> None:
    config = AMOConfig.paper(observe_until=1, transition_steps=1, shrinkage=1.0)
    source = amo(config)
    observe(source, 1, {**ELL, "expert": 1 + 1e-9})
    steps, ell = source.steps_and_ells_at(2)["expert"]
    assert ell == 1 / SAFETY
    assert schedule_for(ell, steps).coefficients == compose(1.0, steps)


def clamped(source: Amo, step: int) -> dict[str, Measurement]:
    """An observation whose least singular values are below tau."""
    rows = observed(source, dict.fromkeys(source.sample(step), 0.1))
    return {name: row._replace(is_clamped=True) for name, row in rows.items()}


def test_the_papers_absolute_tau_is_told_once() -> None:
    source = amo()
    for step, count in ((2, 1), (4, 0)):
        lines = [line for line in source.record(step, clamped(source, step)) if "tau" in line]
        assert len(lines) == count
    measured = amo(MEASURED)
    assert not measured.record(2, clamped(measured, 2))


# ---------------------------------------------------------------- mistakes

KJ = Schedule(((3.4445, -4.775, 2.0315),), norm_scale=1.0)
TRIPLES = ((1.0, 2.0, 3.0),)
MALFORMED = ((), [(1.0, 2.0, 3.0)], ((1.0, 2.0),), ((1.0, 2.0, math.nan),), ((1, 2.0, 3.0),))
OUT_OF_RANGE: list[Any] = [0.0, 1.0000001, math.nan, "1e-3", True]
NO_NUMBER: list[Any] = [0, 2.0, "5", True]
NO_NAME: list[Any] = ["KJ", "", None, []]


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: Fixed({"attn_q": KJ}).bind(REGISTRY), "operator_type"),
        (lambda: as_source("nothing"), "schedule"),
        (lambda: amo().schedules(7), "step"),  # beyond the plan, and before it
        (lambda: amo(AMOConfig.paper(budget_ratio=0.1)), "budget"),
        (lambda: amo(AMOConfig(budget_ratio=0.1)), "budget"),
        (lambda: AMOConfig(planner="greedy"), "planner"),
        (lambda: AMOConfig(observe_until=1201), "observe_until"),
        (lambda: AMOConfig(observe_until=1200, observe_every=7), "observe_every"),
        (lambda: Fixed({}, KJ).load(as_source("pe").state(), MuonConfig(), (), 1), "control"),
        *((partial(named_schedule, name), "schedule: .* one of kj, you, pe") for name in NO_NAME),
        *((partial(Schedule, triples), "coefficients") for triples in MALFORMED),
        *((partial(Schedule, TRIPLES, scale), "norm_scale") for scale in (0.0, math.inf)),
        (partial(Schedule, TRIPLES, 1.0, "none"), "preconditioner"),
        *((partial(compose, ell, 5), r"ell: .* \(0, 1\]") for ell in OUT_OF_RANGE),
        *((partial(simulate, 1e-3, steps), "steps: .* integer >= 1") for steps in NO_NUMBER),
    ],
)
def test_mistakes_are_named(call: Any, field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}"):
        call()


# ---------------------------------------------------------------- whole runs, resumed anywhere

STEPS = 24


@st.composite
def configs(draw: st.DrawFn) -> AMOConfig:
    every = draw(st.integers(1, 3))
    return AMOConfig(
        observe_every=every,
        observe_until=every * draw(st.integers(1, 4)),
        transition_steps=draw(st.integers(1, 6)),
        sample_size=draw(st.integers(1, 6)),
        planner=draw(st.sampled_from(["measured", "paper"])),
        shrinkage=draw(st.sampled_from([0.0, 0.7, 1.0])),
        budget_ratio=draw(st.sampled_from([0.8, 1.0, 1.2])),
        seed=draw(st.integers(0, 3)),
    )


def ell_at(name: str, step: int) -> float:
    """An ell that depends on nothing else; one in four is none."""
    generator = random.Random(f"{name} {step}")
    good = 10 ** generator.uniform(-8, -0.1)
    return generator.choice([good, good, good, math.nan])


def take(source: Amo, step: int) -> tuple[Any, ...]:
    """One optimizer step of a source; all that it shows."""
    applied, sample = (source.phase(step), dict(source.schedules(step))), source.sample(step)
    if sample:
        source.record(step, observed(source, {name: ell_at(name, step) for name in sample}))
    return *applied, sample, source.metrics(step)


def resumed(source: Amo, taken: int, config: AMOConfig, binds_first: bool) -> Amo:
    """Another source that goes on from a state that was written and read."""
    record = json.loads(to_text(control_record(ScheduleState(source.config, source, taken))))
    fresh = Amo(config)
    if binds_first:
        fresh.bind(REGISTRY)
    state = restore(record, ScheduleState(config, fresh), ("auto", None))
    assert state.steps_taken == taken
    assert isinstance(state.source, Amo)
    assert state.source.config == state.config
    if not binds_first:
        state.source.bind(REGISTRY[::-1])  # in any order
    return state.source


def at_some_steps(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[int, Any]]:
    return st.dictionaries(st.integers(1, STEPS), values, max_size=5)


@settings(deadline=None, max_examples=20)
@given(
    config=configs(),
    changes=at_some_steps(st.tuples(configs(), st.sampled_from(["replan", "keep_checkpoint"]))),
    saves=at_some_steps(st.booleans()),
)
def test_a_source_resumed_anywhere_goes_on_as_it_would_have(
    config: AMOConfig, changes: Mapping[int, Any], saves: Mapping[int, bool]
) -> None:
    straight, broken = Amo(config), Amo(config)
    for source in (straight, broken):
        source.bind(REGISTRY)
    for step in range(1, STEPS + 1):
        if step in changes:
            other, rule = changes[step]
            other = dataclasses.replace(other, on_config_change=rule)
            straight = resumed(straight, step - 1, other, True)
            broken = resumed(broken, step - 1, other, False)
        elif step in saves:
            broken = resumed(broken, step - 1, broken.config, saves[step])
        last = straight.steps_and_ells_at(step)
        assert take(straight, step) == take(broken, step), step
        assert broken.state() == straight.state()
        # A glide begins where the run is.
        assert straight.steps_and_ells_at(step) == last


def test_a_type_without_errors_since_settings_changed_falls_back() -> None:
    """Its earlier observations have no errors that a measured plan could go by."""
    source = amo(MEASURED)
    observe(source, 2)
    other = dataclasses.replace(MEASURED, budget_ratio=0.9, on_config_change="replan")
    source, lines = resumed(source, 3, other, True), []
    for step in (4, 6):
        lines += observe(source, step, {**ELL, "expert": math.nan})
    assert "expert has no valid observation; it falls back to base_ell = 0.001" in lines
