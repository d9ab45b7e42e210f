from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from amo_dist.config import AMOConfig, MuonConfig
from amo_dist.schedule.amo import AMOPolicy
from amo_dist.schedule.coefficients import SCHEDULE_NAMES, named_schedule
from amo_dist.schedule.plan import Plan
from amo_dist.schedule.polar_express import SAFETY, compose
from amo_dist.schedule.policies import Policy, TablePolicy, UniformPolicy, named_policy
from amo_dist.schedule.types import MatrixInfo, Schedule
from tests import spectra

TYPES = ("attn_q", "attn_k", "mlp_up", "router")
REGISTRY = [MatrixInfo(f"layers.{i}.{t}", (8, 4 + i), t) for t in TYPES for i in range(3)]
TIMES: dict[str, Any] = {
    "observe_until": 4,
    "observe_every": 2,
    "transition_steps": 3,
    "sample_size": 2,
}
CONFIG = AMOConfig.paper(planner="exact", **TIMES)
MEASURED = AMOConfig(**TIMES)
both = pytest.mark.parametrize(
    "config", [pytest.param(CONFIG, id="projected"), pytest.param(MEASURED, id="measured")]
)
ELL = {"attn_q": 3e-5, "attn_k": 2e-3, "mlp_up": 0.04, "router": 1e-3}
KJ = named_schedule("kj").schedule


def observe(policy: AMOPolicy, step: int) -> None:
    ells = {name: ELL[name.rsplit(".", 1)[1]] for name in policy.sample(step)}
    spectra.record(policy, step, ells)


def run_to(step: int, config: AMOConfig = CONFIG) -> AMOPolicy:
    """A policy after the whole of an optimizer step."""
    policy = AMOPolicy(config)
    policy.bind(REGISTRY)
    for now in range(1, step + 1):
        policy.schedules(now)
        if policy.sample(now):
            observe(policy, now)
        if policy.plan_due(now):
            policy.adopt_plan(policy.make_plan())
    return policy


POLICIES = [*(lambda name=name: named_policy(name) for name in SCHEDULE_NAMES)]
POLICIES += [lambda: AMOPolicy(CONFIG), lambda: AMOPolicy(MEASURED), lambda: UniformPolicy(KJ)]


@pytest.mark.parametrize("make", POLICIES)
def test_schedules_need_a_registry(make: Any) -> None:
    policy: Policy = make()
    with pytest.raises(ValueError, match=r"registry: found 'none', expected a call of bind\(\)"):
        policy.schedules(1)
    policy.bind(REGISTRY)
    assert tuple(policy.schedules(1)) == TYPES


@pytest.mark.parametrize("make", POLICIES)
def test_the_registry_is_taken_once(make: Any) -> None:
    policy: Policy = make()
    policy.bind(REGISTRY)
    policy.bind(REGISTRY[::-1])
    with pytest.raises(ValueError, match=r"registry: found .*, expected the registry this policy"):
        policy.bind(REGISTRY[1:])


def test_the_order_of_the_registry_is_of_no_consequence() -> None:
    one, other = AMOPolicy(CONFIG), AMOPolicy(CONFIG)
    one.bind(REGISTRY)
    other.bind(REGISTRY[::-1])
    assert one.sample(2) == other.sample(2)


@pytest.mark.parametrize("make", POLICIES)
def test_mappings_are_read_only_and_stay_the_same(make: Any) -> None:
    policy: Policy = make()
    policy.bind(REGISTRY)
    first = policy.schedules(1)
    assert policy.schedules(2) is first
    with pytest.raises(TypeError):
        first["attn_q"] = KJ  # type: ignore[index]


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_fixed_policies_try_nothing(name: str) -> None:
    assert named_policy(name).trials() == ()


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_fixed_policies_neither_observe_nor_plan(name: str) -> None:
    policy = named_policy(name)
    policy.bind(REGISTRY)
    assert policy.phase(10**6) == "uniform"
    assert policy.sample(150) == ()
    assert not policy.plan_due(1200)
    for call in (lambda: policy.record(1, {}), policy.make_plan, lambda: policy.adopt_plan("{}")):
        with pytest.raises(ValueError, match=r": found .*, expected no"):
            call()


def test_step_tables_apply_by_type_and_default_elsewhere() -> None:
    policy = named_policy("a2")
    policy.bind(REGISTRY)
    steps = {name: schedule.num_steps for name, schedule in policy.schedules(1).items()}
    assert steps == {"attn_q": 6, "attn_k": 4, "mlp_up": 4, "router": 5}
    assert policy.metrics(1) == {f"amo/ns_steps/{name}": k for name, k in steps.items()}


def test_a_table_without_default_names_the_type_it_lacks() -> None:
    policy = TablePolicy({"attn_q": KJ, "attn_k": KJ, "mlp_up": KJ})
    with pytest.raises(ValueError, match=r"operator_type: found 'router', expected one with a"):
        policy.bind(REGISTRY)
    with pytest.raises(ValueError, match="found 'none'"):
        policy.schedules(1)


# --- AMO


@both
def test_amo_from_the_first_step_to_the_lock(config: AMOConfig) -> None:
    policy = run_to(3, config)
    uniform = policy.schedules(1)
    expected = Schedule(compose(SAFETY * CONFIG.base_ell, 5), norm_scale=SAFETY)
    assert set(uniform.values()) == {expected}
    assert policy.schedules(4) is uniform
    with pytest.raises(ValueError, match=r"step: found 5, expected at most 4 while no plan"):
        policy.schedules(5)

    policy = run_to(12, config)
    plan = policy.plan
    assert plan is not None
    locked = policy.schedules(CONFIG.lock_step)
    assert dict(locked) == plan.schedules()
    for name, ell, steps in zip(TYPES, plan.ell_target, plan.allocation, strict=True):
        assert locked[name].coefficients == compose(SAFETY * ell, steps)
    assert policy.schedules(CONFIG.lock_step + 1000) is locked
    assert [policy.phase(s) for s in (4, 5, 6, 7)] == [
        "observation",
        "transition",
        "transition",
        "locked",
    ]
    assert policy.schedules(5) != policy.schedules(6) != locked


def test_the_glide_recomposes_at_every_step() -> None:
    policy = run_to(4)
    seen = [policy.schedules(step)["router"].coefficients for step in (4, 5, 6, 7)]
    assert len(set(seen)) == 4


def test_equal_schedules_keep_the_mapping_through_a_glide() -> None:
    """With no shrinkage toward the observations the plan may equal the start: no replanning."""
    config = AMOConfig.paper(
        observe_until=1, observe_every=1, transition_steps=5, shrinkage=0.0, sample_size=1
    )
    policy = run_to(1, config)
    first = policy.schedules(1)
    assert all(policy.schedules(step) is first for step in range(2, 10))


@both
def test_steps_may_be_asked_for_in_any_order(config: AMOConfig) -> None:
    policy = run_to(4, config)
    forward = [dict(policy.schedules(step)) for step in range(1, 10)]
    backward = [dict(policy.schedules(step)) for step in range(9, 0, -1)]
    assert forward == backward[::-1]


@both
@pytest.mark.parametrize("saved_after", range(9))
def test_resuming_at_any_step_continues_bit_for_bit(saved_after: int, config: AMOConfig) -> None:
    straight = run_to(saved_after, config)
    state = json.loads(json.dumps(straight.state_dict()))
    resumed = AMOPolicy(config)
    resumed.load_state_dict(state)
    resumed.bind(REGISTRY)
    assert resumed.state_dict() == straight.state_dict()
    for now in range(saved_after + 1, 12):
        for policy in (straight, resumed):
            if policy.sample(now):
                observe(policy, now)
            if policy.plan_due(now):
                policy.adopt_plan(policy.make_plan())
        assert resumed.digest(now) == straight.digest(now)
        assert resumed.metrics(now) == straight.metrics(now)


def test_a_state_restored_over_another_replaces_it() -> None:
    policy, other = run_to(8), run_to(2)
    assert policy.schedules(8) != other.schedules(2)
    policy.load_state_dict(other.state_dict())
    assert policy.plan is None
    assert policy.schedules(2) == other.schedules(2)


@both
def test_every_rank_adopts_the_plan_of_one(config: AMOConfig) -> None:
    ranks = [AMOPolicy(config) for _ in range(3)]
    for policy in ranks:
        policy.bind(REGISTRY)
        for now in (2, 4):
            observe(policy, now)
    payload = ranks[1].make_plan()
    for policy in ranks:
        policy.adopt_plan(payload)
    assert len({policy.digest(5) for policy in ranks}) == 1
    assert ranks[0].plan == Plan.from_json(payload)


def test_digests_tell_states_apart() -> None:
    digests = {run_to(3).digest(3), run_to(1).digest(1), run_to(7).digest(5), run_to(7).digest(7)}
    assert len(digests) == 4
    one = run_to(3)
    other = AMOPolicy(CONFIG)
    other.bind(REGISTRY)
    spectra.record(other, 2, dict.fromkeys(other.sample(2), 0.5))
    assert dict(one.schedules(3)) == dict(other.schedules(3))
    assert one.digest(3) != other.digest(3)


@both
def test_metrics_have_the_same_keys_at_every_step(config: AMOConfig) -> None:
    policy = AMOPolicy(config)
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


@pytest.mark.parametrize("make", POLICIES)
def test_state_round_trips_through_json(make: Any) -> None:
    policy, other = make(), make()
    state = json.loads(json.dumps(policy.state_dict()))
    assert state["version"] == 1
    assert state["policy"] == policy.name
    other.load_state_dict(state)
    assert other.state_dict() == state


@pytest.mark.parametrize("make", POLICIES)
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
def test_a_malformed_state_is_refused(make: Any, changes: dict[Any, Any], message: str) -> None:
    policy: Policy = make()
    with pytest.raises(ValueError, match=message):
        policy.load_state_dict({**policy.state_dict(), **changes})


@pytest.mark.parametrize("make", POLICIES)
def test_a_missing_key_is_named(make: Any) -> None:
    policy: Policy = make()
    for key in {"version", "policy", "schedules"} & policy.state_dict().keys():
        state = policy.state_dict()
        del state[key]
        with pytest.raises(ValueError, match=rf"state\.{key}: found 'nothing', expected "):
            policy.load_state_dict(state)
    with pytest.raises(ValueError, match=r"state: found \[\], expected a mapping"):
        policy.load_state_dict([])  # type: ignore[arg-type]


def test_other_coefficients_are_refused() -> None:
    state = named_policy("kj").state_dict()
    with pytest.raises(ValueError, match=r"state\.schedules: found .*coefficients have changed"):
        named_policy("you").load_state_dict(state)
    with pytest.raises(ValueError, match=r"state\.schedules: found 3, expected "):
        named_policy("kj").load_state_dict({**state, "schedules": 3})


@pytest.mark.parametrize("make", POLICIES)
@pytest.mark.parametrize("bound", [False, True])
def test_a_policy_that_resumes_is_new_and_bound_as_this_one(make: Any, bound: bool) -> None:
    policy: Policy = make()
    if bound:
        policy.bind(REGISTRY)
    config = AMOConfig() if policy.name == "amo" else MuonConfig()
    other = policy.resumed(policy.state_dict(), steps_taken=0, config=config)
    assert other is not policy
    assert type(other) is type(policy)
    if bound:
        assert dict(other.schedules(1)) == dict(policy.schedules(1))
    else:
        with pytest.raises(ValueError, match="registry: found 'none'"):
            other.schedules(1)


@pytest.mark.parametrize("is_asked_for", [False, True])
def test_settings_decide_about_threads_and_falls_back(is_asked_for: bool) -> None:
    config = dataclasses.replace(
        CONFIG, observe_in_background=is_asked_for, ns_guard_fallback=is_asked_for
    )
    policy = run_to(8, config)
    assert policy.observes_in_background == is_asked_for
    assert policy.fall_back(8, REGISTRY[0].name) == is_asked_for
    fixed = named_policy("kj")
    fixed.bind(REGISTRY)
    assert not fixed.observes_in_background
    assert not fixed.fall_back(8, REGISTRY[0].name)


def test_an_unknown_name_lists_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"schedule: found 'muon', expected one of kj, you"):
        named_policy("muon")
