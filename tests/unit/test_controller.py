from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from amo_dist.config import AMOConfig
from amo_dist.schedule.observation import draw
from amo_dist.schedule.plan import Plan
from amo_dist.schedule.planning import plan_allocation
from amo_dist.schedule.polar_express import SAFETY, compose, composed
from tests import spectra
from tests.unit.controller_runs import (
    BOTH,
    CONFIG,
    ELL,
    MEASURED,
    TYPES,
    controller,
    observe,
    plan_of,
)

# --- drawing


def test_the_draw_is_pinned() -> None:
    """Another draw would observe other matrices after a resume on a new version."""
    names = [f"layers.{i}" for i in range(28)]
    assert draw(42, 150, "attn_q", names, 8) == (
        "layers.2",
        "layers.6",
        "layers.11",
        "layers.12",
        "layers.14",
        "layers.15",
        "layers.17",
        "layers.26",
    )
    assert draw(42, 150, "attn_q", names, 8) == draw(42, 150, "attn_q", tuple(names), 8)


def test_the_draw_depends_on_seed_step_and_type() -> None:
    names = [f"layers.{i}" for i in range(100)]
    draws = {
        draw(seed, step, name, names, 8)
        for seed in (1, 11)
        for step in (1, 11)
        for name in ("attn_q", "attn_k")
    }
    assert len(draws) == 8


@given(st.integers(0, 2**70), st.integers(1, 10**6), st.integers(0, 12), st.integers(1, 15))
def test_the_draw_is_without_replacement(seed: int, step: int, count: int, size: int) -> None:
    names = [f"n{i:02}" for i in range(count)]
    drawn = draw(seed, step, "t", names, size)
    assert len(drawn) == min(size, count)
    assert list(drawn) == sorted(set(drawn))
    assert set(drawn) <= set(names)


def test_the_draw_is_uniform() -> None:
    names = [f"n{i}" for i in range(10)]
    pairs = Counter(draw(7, step, "t", names, 2) for step in range(1, 9001))
    assert len(pairs) == 45
    # 200 expected of each pair, standard deviation 14; 5 of those cover all 45 pairs.
    assert all(abs(count - 200) < 70 for count in pairs.values())


def test_samples_come_at_the_interval_up_to_the_horizon() -> None:
    target = controller()
    assert [step for step in range(1, 20) if target.sample(step)] == [2, 4, 6]
    sample = target.sample(2)
    assert sample == tuple(sorted(sample))
    assert Counter(name.rsplit(".", 1)[1] for name in sample) == dict.fromkeys(TYPES, 3)
    assert target.sample(2) != target.sample(4)


# --- observing


def test_a_transition_of_one_step_is_the_lock() -> None:
    one = controller(AMOConfig(observe_until=2, observe_every=1, transition_steps=1))
    assert [one.phase(step) for step in (1, 2, 3, 4)] == ["observation"] * 2 + ["locked"] * 2


def test_the_median_of_an_even_count_is_the_mean_of_the_middle_two() -> None:
    target = controller(AMOConfig(observe_until=2, observe_every=2, sample_size=4))
    names = target.sample(2)
    ells = dict.fromkeys(names, 0.5)
    mine = [name for name in names if name.endswith("attn_q")]
    ells.update(zip(mine, [0.5, 0.25, 0.125, 0.0625], strict=True))
    spectra.record(target, 2, ells)
    (found,) = target.observations
    assert found.ell["attn_q"] == (0.25 / SAFETY + 0.125 / SAFETY) / 2


def test_invalid_matrices_are_left_out_counted_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    target = controller()
    ells = dict.fromkeys(target.sample(2), 0.5)
    mine = [name for name in ells if name.endswith("attn_q")]
    ells[mine[0]], ells[mine[1]], ells[mine[2]] = math.nan, math.inf, 0.25
    with caplog.at_level(logging.WARNING):
        spectra.record(target, 2, ells)
    (found,) = target.observations
    assert found.ell["attn_q"] == 0.25 / SAFETY
    assert found.num_sampled == dict.fromkeys(TYPES, 3)
    assert found.num_invalid == {"attn_q": 2, "mlp_down": 0, "expert": 0}
    assert caplog.messages == [f"step 2: no valid ell for {mine[0]}, {mine[1]}: left out"]


@pytest.mark.parametrize("config", BOTH)
def test_a_type_without_valid_observation_falls_back(
    config: AMOConfig, caplog: pytest.LogCaptureFixture
) -> None:
    target = controller(config)
    for step in (2, 4, 6):
        observe(target, step, {**ELL, "expert": math.nan})
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        plan = Plan.from_json(target.make_plan())
    assert "expert has no valid observation; it falls back to base_ell = 0.001" in caplog.text
    assert plan.ell_robust[2] == plan.ell_target[2] == CONFIG.base_ell
    target.adopt_plan(plan.to_json())
    assert target.observations[0].ell["expert"] is None


def test_median_of_medians_passes_over_invalid_observations() -> None:
    target = controller()
    for step, ell, whole in ((2, 0.1, 1e-5), (4, math.nan, 2e-3), (6, 0.3, 3e-5)):
        observe(target, step, {**ELL, "expert": ell, "attn_q": whole})
    plan = Plan.from_json(target.make_plan())
    assert plan.ell_robust[0] == 3e-5 / SAFETY
    assert plan.ell_robust[2] == (0.1 / SAFETY + 0.3 / SAFETY) / 2
    exact = Fraction("0.7") * Fraction(plan.ell_robust[2]) + Fraction("0.3") * Fraction(1e-3)
    assert plan.ell_target[2] == float(exact)


def test_single_rows_have_ell_one() -> None:
    times = {"observe_until": 1, "observe_every": 1, "transition_steps": 1, "sample_size": 3}
    target = controller(AMOConfig.paper(**times, shrinkage=1.0))
    observe(target, 1, {**ELL, "expert": 1 + 1e-9})
    target.adopt_plan(target.make_plan())
    steps, ell = target.state_at(2)["expert"]
    assert ell == 1 / SAFETY
    assert composed(ell, steps).coefficients == compose(1.0, steps)


@pytest.mark.parametrize("ell", [-0.1, 1.001, 2.0, -math.inf, "0.5", None, True])
def test_what_is_no_ell_is_refused(ell: Any) -> None:
    target = controller()
    ells = {**dict.fromkeys(target.sample(2), 0.5), target.sample(2)[0]: ell}
    with pytest.raises(
        ValueError, match=r"observed_by_name\.layers.*, expected a number in \(0, 1\]"
    ):
        spectra.record(target, 2, ells)
    assert target.observations == ()


def test_records_out_of_order_are_refused() -> None:
    target = controller()
    with pytest.raises(ValueError, match=r"step: found 4, expected 2, the next observation"):
        observe(target, 4)
    observe(target, 2)
    with pytest.raises(ValueError, match=r"step: found 2, expected 4, the next observation"):
        observe(target, 2)
    for names in (target.sample(4)[1:], (*target.sample(4), "more"), ()):
        with pytest.raises(ValueError, match="observed_by_name: found"):
            spectra.record(target, 4, dict.fromkeys(names, 0.5))


# --- planning and gliding


@pytest.mark.parametrize("config", BOTH)
def test_the_plan_is_due_after_the_last_observation_until_adopted(config: AMOConfig) -> None:
    target = controller(config)
    for step in (2, 4):
        observe(target, step)
        assert not target.plan_due()
    with pytest.raises(ValueError, match=r"observations: found .*, expected observations up to"):
        target.make_plan()
    assert not target.plan_due()
    observe(target, 6)
    assert target.plan_due()
    with pytest.raises(ValueError, match=r"step: found 7, expected at most 6 while no plan"):
        target.state_at(7)
    target.adopt_plan(target.make_plan())
    assert not target.plan_due()


def test_a_plan_of_other_observations_or_configuration_is_refused() -> None:
    target = controller()
    for step in (2, 4, 6):
        observe(target, step)
    with pytest.raises(ValueError, match=r"plan\.ell_robust: found .*, as this rank has recorded"):
        target.adopt_plan(plan_of(ell={**ELL, "expert": 0.5}).to_json())
    with pytest.raises(ValueError, match=r"plan\.ell_target: found"):
        target.adopt_plan(plan_of(AMOConfig(**{**CONFIG.to_dict(), "shrinkage": 0.5})).to_json())
    with pytest.raises(ValueError, match=r"plan\.budget: found 12, expected 15"):
        target.adopt_plan(plan_of(AMOConfig(**{**CONFIG.to_dict(), "budget_ratio": 0.8})).to_json())
    with pytest.raises(ValueError, match=r"plan\.ell_target: found .*, as this rank has recorded"):
        target.adopt_plan(plan_of(MEASURED).to_json())
    assert target.plan is None


def test_a_measured_plan_of_others_is_refused() -> None:
    target = controller(MEASURED)
    for step in (2, 4, 6):
        observe(target, step)
    plan = plan_of(MEASURED)
    # The medians of a type stay, and one of its matrices is harder.
    others = {**plan.to_dict(), "measured": [each.to_dict() for each in plan.measured or ()]}
    others["measured"][0]["uniform_residual"] = (0.5).hex()
    for payload, field in (
        (json.dumps(others), "measured"),
        (plan_of(CONFIG).to_json(), "weights"),
        (json.dumps({**plan.to_dict(), "num_matrices": [5, 5, 4]}), "num_matrices"),
        (json.dumps({**plan.to_dict(), "budget": 1}), "budget"),
    ):
        with pytest.raises(ValueError, match=rf"plan\.{field}: found .*, as this rank has record"):
            target.adopt_plan(payload)
    assert target.plan is None
    target.adopt_plan(plan.to_json())


@settings(deadline=None, max_examples=30)
@given(
    ells=st.lists(st.floats(-6, -0.5).map(lambda x: 10.0**x), min_size=1, max_size=9),
    ratio=st.sampled_from([0.3, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.7]),
    duration=st.integers(1, 23),
)
def test_totals_advance_monotonically_and_counts_stay_near(
    ells: list[float], ratio: float, duration: int
) -> None:
    targets = {f"t{i}": ell for i, ell in enumerate(ells)}
    config = AMOConfig.paper(budget_ratio=ratio)
    plan = plan_allocation(config, targets)
    totals = [5 * len(ells)]
    for done in range(1, duration + 1):
        p = Fraction(done, duration)
        exact = [5 + p * (k - 5) for k in plan.allocation]
        counts = [steps for steps, _ in plan.state_at(p).values()]
        assert all(math.floor(x) <= k <= math.ceil(x) for k, x in zip(counts, exact, strict=True))
        assert sum(counts) == math.floor(sum(exact) + Fraction(1, 2))
        totals.append(sum(counts))
    falling = plan.budget < totals[0]
    assert totals == sorted(totals, reverse=falling)
    assert totals[-1] == plan.budget
    assert counts == list(plan.allocation)


@settings(deadline=None, max_examples=40)
@given(
    allocation=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    start=st.integers(1, 9),
    duration=st.integers(1, 40),
)
@example(allocation=[4, 7], start=5, duration=10)
def test_no_type_of_a_measured_plan_turns_back(
    allocation: list[int], start: int, duration: int
) -> None:
    names = [f"t{i}" for i in range(len(allocation))]
    plan = plan_allocation(AMOConfig.paper(), dict.fromkeys(names, 1e-3))
    changes = {"criterion": "update", "base_steps": start, "allocation": tuple(allocation)}
    plan = dataclasses.replace(plan, **changes)
    for name, end in zip(names, allocation, strict=True):
        states = (plan.state_at(Fraction(u, duration))[name] for u in range(duration + 1))
        counts = [steps for steps, _ in states]
        assert counts == sorted(counts, reverse=start > end)
        assert (counts[0], counts[-1]) == (start, end)


def test_largest_remainder_ties_go_to_the_earlier_type() -> None:
    plan = plan_allocation(AMOConfig.paper(), {"a": 1e-6, "b": 1e-6, "c": 0.5, "d": 0.5})
    assert plan.allocation == (7, 7, 3, 3)
    # 5.5, 5.5, 4.5, 4.5 sum to 20: two of the four are rounded up.
    counts = [steps for steps, _ in plan.state_at(Fraction(1, 4)).values()]
    assert counts == [6, 6, 4, 4]
