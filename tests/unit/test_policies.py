from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from typing import Any

import pytest

from amo_dist.config import AMOConfig
from amo_dist.schedule.amo import AMOPolicy
from amo_dist.schedule.coefficients import SCHEDULE_NAMES, named_schedule
from amo_dist.schedule.polar_express import SAFETY, compose
from amo_dist.schedule.policies import Policy, TablePolicy, as_policy
from amo_dist.schedule.types import MatrixInfo, Schedule
from tests import spectra
from tests.held import Held

TYPES = ("attn_q", "attn_k", "mlp_up", "router")
REGISTRY = [MatrixInfo(f"layers.{i}.{t}", (8, 4 + i), t) for t in TYPES for i in range(3)]
TIMES: dict[str, Any] = {
    "observe_until": 4,
    "observe_every": 2,
    "transition_steps": 3,
    "sample_size": 2,
}
CONFIG = AMOConfig.paper(**TIMES)
MEASURED = AMOConfig(**TIMES)
both = pytest.mark.parametrize(
    "config", [pytest.param(CONFIG, id="projected"), pytest.param(MEASURED, id="measured")]
)
ELL = {"attn_q": 3e-5, "attn_k": 2e-3, "mlp_up": 0.04, "router": 1e-3}
KJ = named_schedule("kj").schedule


def observe(policy: Held, step: int) -> None:
    ells = {name: ELL[name.rsplit(".", 1)[1]] for name in policy.sample(step)}
    spectra.record(policy, step, ells)


def run_to(step: int, config: AMOConfig = CONFIG) -> Held:
    """A policy after the whole of an optimizer step."""
    policy = Held(AMOPolicy(config))
    policy.bind(REGISTRY)
    for now in range(1, step + 1):
        policy.schedules(now)
        if policy.sample(now):
            observe(policy, now)
        if policy.plan_due():
            policy.adopt_plan(policy.make_plan())
    return policy


POLICIES: list[Policy] = [*map(as_policy, SCHEDULE_NAMES)]
POLICIES += [AMOPolicy(CONFIG), AMOPolicy(MEASURED), as_policy(KJ)]
each = pytest.mark.parametrize("policy", POLICIES)


@each
def test_a_policy_is_a_value(policy: Policy) -> None:
    """It is copied and pickled as it is, and a run changes nothing of it."""
    held = Held(policy, REGISTRY)
    before = held.schedules(1)
    for other in (copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))):
        assert other == policy
        assert Held(other, REGISTRY).schedules(1) == before
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_fixed_policies_neither_observe_nor_plan(name: str) -> None:
    policy = Held(as_policy(name), REGISTRY)
    assert policy.policy.is_fixed
    assert policy.phase(10**6) == "uniform"
    assert policy.sample(150) == ()
    assert policy.next_change(1) == math.inf
    assert not policy.plan_due()
    calls = lambda: policy.record(1, {}), policy.make_plan, lambda: policy.adopt_plan("{}")
    for call in calls:
        with pytest.raises(ValueError, match=r": found .*, expected no"):
            call()


def test_step_tables_apply_by_type_and_default_elsewhere() -> None:
    policy = Held(as_policy("a2"), REGISTRY)
    steps = {name: schedule.num_steps for name, schedule in policy.schedules(1).items()}
    assert steps == {"attn_q": 6, "attn_k": 4, "mlp_up": 4, "router": 5}
    assert policy.metrics(1) == {f"amo/ns_steps/{name}": k for name, k in steps.items()}


def test_a_table_without_default_names_the_type_it_lacks() -> None:
    policy = TablePolicy({"attn_q": KJ, "attn_k": KJ, "mlp_up": KJ})
    with pytest.raises(ValueError, match=r"operator_type: found 'router', expected one with a"):
        policy.groups(REGISTRY)


# --- AMO


@both
def test_amo_from_the_first_step_to_the_lock(config: AMOConfig) -> None:
    policy = run_to(3, config)
    uniform = policy.schedules(1)
    expected = Schedule(compose(SAFETY * CONFIG.base_ell, 5), norm_scale=SAFETY)
    assert set(uniform.values()) == {expected}
    assert policy.schedules(4) == uniform
    assert policy.next_change(4) == 5
    with pytest.raises(ValueError, match=r"step: found 5, expected at most 4 while no plan"):
        policy.schedules(5)

    policy = run_to(12, config)
    plan = policy.plan
    assert plan is not None
    locked = policy.schedules(CONFIG.lock_step)
    assert locked == plan.schedules()
    for name, ell, steps in zip(TYPES, plan.ell_target, plan.allocation, strict=True):
        assert locked[name].coefficients == compose(SAFETY * ell, steps)
    assert policy.schedules(CONFIG.lock_step + 1000) == locked
    assert [policy.next_change(s) for s in (5, 6, 7)] == [6, 7, math.inf]
    assert [policy.phase(s) for s in (4, 5, 6, 7)] == [
        "observation",
        "transition",
        "transition",
        "locked",
    ]
    assert policy.schedules(5) != policy.schedules(6) != locked


@both
def test_nothing_changes_before_the_next_change(config: AMOConfig) -> None:
    """What the controller holds on to until then."""
    for until in range(13):
        policy = run_to(until, config)
        for step in range(max(until, 1), (4 if until < 4 else 20) + 1):
            change = policy.next_change(step)
            for later in range(step + 1, min(int(min(change, 25)), 25)):
                assert policy.schedules(later) == policy.schedules(step)
                assert policy.digest(later) == policy.digest(step)
                assert policy.sample(later) == ()
                assert (policy.phase(later) == "locked") == (policy.phase(step) == "locked")


def test_digests_tell_states_apart() -> None:
    digests = {run_to(3).digest(3), run_to(1).digest(1), run_to(7).digest(5), run_to(7).digest(7)}
    assert len(digests) == 4
    one = run_to(3)
    other = Held(AMOPolicy(CONFIG))
    other.bind(REGISTRY)
    spectra.record(other, 2, dict.fromkeys(other.sample(2), 0.5))
    assert dict(one.schedules(3)) == dict(other.schedules(3))
    assert one.digest(3) != other.digest(3)


@both
def test_metrics_have_the_same_keys_at_every_step(config: AMOConfig) -> None:
    policy = Held(AMOPolicy(config))
    policy.bind(REGISTRY)
    before = policy.metrics(1)
    assert before["amo/ell/router"] == before["amo/ell_target/router"] == CONFIG.base_ell
    assert (before["amo/phase"], before["amo/observations"]) == (0.0, 0.0)
    names = policy.sample(2)
    first = {n: math.nan if n.endswith(("router", "q")) else 0.5 for n in names}
    spectra.record(policy, 2, first)
    second = {n: math.nan if n.endswith("router") else 0.25 for n in policy.sample(4)}
    spectra.record(policy, 4, second)
    policy.adopt_plan(policy.make_plan())
    after = policy.metrics(7)
    assert after.keys() == before.keys()
    assert all(type(value) is float for value in after.values())
    assert after["amo/ell/attn_q"] == 0.25 / SAFETY
    assert after["amo/ell/router"] == CONFIG.base_ell
    assert after["amo/invalid_observations"] == 6.0
    assert (after["amo/phase"], after["amo/observations"]) == (2.0, 2.0)
    plan = policy.plan
    assert plan is not None
    assert after["amo/ell_target/attn_q"] == plan.ell_target[0]
    assert after["amo/ns_steps/attn_q"] == plan.allocation[0]
    assert policy.metrics(5)["amo/phase"] == 1.0


# --- saved state of every policy


@each
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, r"state\.version: found 2, expected 1"),
        ({"version": True}, r"state\.version: found True, expected 1"),
        ({"policy": "other"}, r"state\.policy: found 'other', expected "),
        ({"policy": None}, r"state\.policy: found None, expected "),
        ({"more": 1}, r"state\.more: found 'this key', expected only the keys "),
        ({3: 1}, r"state\.3: found 'this key', expected only the keys "),
    ],
)
def test_a_malformed_state_is_refused(
    policy: Policy, changes: dict[Any, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        policy.from_dict({**policy.to_dict(policy.start()), **changes})


@each
def test_a_missing_key_is_named(policy: Policy) -> None:
    whole = policy.to_dict(policy.start())
    for missing in whole:
        state = {key: value for key, value in whole.items() if key != missing}
        with pytest.raises(ValueError, match=rf"state\.{missing}: found 'nothing', expected "):
            policy.from_dict(state)
    with pytest.raises(ValueError, match=r"state: found \[\], expected a mapping"):
        policy.from_dict([])


def test_other_coefficients_are_refused() -> None:
    state = as_policy("kj").to_dict(None)
    with pytest.raises(ValueError, match=r"state\.schedules: found .*coefficients have changed"):
        as_policy("you").from_dict(state)
    with pytest.raises(ValueError, match=r"state\.schedules: found 3, expected "):
        as_policy("kj").from_dict({**state, "schedules": 3})
