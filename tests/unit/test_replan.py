"""Planning again after the lock."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from amo_dist.config import AMOConfig
from amo_dist.schedule.amo import AMOPolicy
from tests.held import Held
from tests.unit.controller_runs import ELL, REGISTRY, TYPES, controller, observe, planned

TIMES: dict[str, Any] = {
    "observe_until": 6,
    "observe_every": 2,
    "transition_steps": 3,
    "sample_size": 3,
    "replan_every": 8,
}
CONFIG = AMOConfig.paper(**TIMES)
MEASURED = AMOConfig(**TIMES)
both = pytest.mark.parametrize(
    "config", [pytest.param(CONFIG, id="projected"), pytest.param(MEASURED, id="measured")]
)
HARDER = {**ELL, "expert": 1e-6, "attn_q": 0.3}


def run(target: Held, start: int, until: int) -> None:
    """Steps ``start`` to ``until``; from step 10 on matrices look otherwise."""
    for step in range(start, until + 1):
        if target.sample(step):
            observe(target, step, ELL if step < 10 else HARDER)
        if target.plan_due():
            target.adopt_plan(target.make_plan())


def ran(until: int, config: AMOConfig = CONFIG) -> Held:
    target = controller(config)
    run(target, 1, until)
    return target


@both
def test_observations_and_plans_come_when_the_calendar_says(config: AMOConfig) -> None:
    """Plans at 6, 14 and 22, each after observations from the lock of the one before on."""
    target = controller(config)
    observed, planned, phases = [], [], []
    for step in range(1, 27):
        phases.append(target.phase(step)[0])
        if target.sample(step):
            observed.append(step)
        before = target.plan
        run(target, step, step)
        if target.plan is not before:
            planned.append(step)
    assert planned == [6, 14, 22]
    # Locks at 9 and 17: multiples of two from there.
    assert observed == [2, 4, 6, 10, 12, 14, 18, 20, 22, 26]
    assert "".join(phases) == "oooooo" + "ttl" + "lllll" + "ttl" + "lllll" + "ttl" + "l"


def test_a_lock_that_is_itself_a_step_of_observation_is_observed() -> None:
    config = AMOConfig(observe_until=4, observe_every=2, transition_steps=4, replan_every=4)
    target = planned(config)
    assert [step for step in range(5, 9) if target.sample(step)] == [8]


@both
def test_only_observations_since_the_lock_make_the_next_plan(config: AMOConfig) -> None:
    plan, alone = ran(14, config).plan, controller(config)
    assert plan is not None
    for step in (2, 4, 6):
        observe(alone, step, HARDER)
    # As if nothing had been before, but for the rounding of means of three equal errors or two.
    expected = json.loads(alone.make_plan())
    found = json.loads(plan.to_json())
    assert found["allocation"] == expected["allocation"]
    for key in ("ells", "residuals", "distances"):
        for mine, other in zip(found["measured"], expected["measured"], strict=True):
            assert list(map(float.fromhex, mine[key])) == pytest.approx(
                list(map(float.fromhex, other[key])), rel=1e-14
            )
    # The medians of what HARDER gave alone; one observation of ELL would have no part in them.
    by_type = dict(zip(TYPES, plan.ell_robust, strict=True))
    assert by_type == {name: HARDER[name] / 1.01 for name in TYPES}


@pytest.mark.parametrize("stop", [10, 12, 14, 18, 20, 22])
def test_a_state_of_another_step_is_refused(stop: int) -> None:
    state = ran(stop).state_dict()
    with pytest.raises(ValueError, match="steps_taken: found"):
        restored(state, stop - 1)
    late = stop + (2 if stop % 8 != 6 else 4)
    with pytest.raises(ValueError, match="observations: found"):
        restored(state, late)


def restored(state: dict[str, Any], steps_taken: int, config: AMOConfig = CONFIG) -> Held:
    fresh = Held(AMOPolicy(config))
    target = fresh.resumed(state, steps_taken=steps_taken, config=config)
    target.bind(REGISTRY)
    return target


def test_no_plan_is_adopted_between_two() -> None:
    target = ran(12)
    assert target.plan is not None
    with pytest.raises(ValueError, match=r"observations: found .*, expected observations up to"):
        target.adopt_plan(target.plan.to_json())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"replan_every": -2}, "replan_every: found -2, expected an integer >= 0"),
        ({"replan_every": 3}, "replan_every: found 3, expected a multiple of observe_every = 2"),
        ({"replan_every": 2}, "replan_every: found 2, .* no less than transition_steps = 3"),
        ({"observe_only": True}, "replan_every: found 8, expected 0 with observe_only"),
    ],
)
def test_a_bad_interval_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)
