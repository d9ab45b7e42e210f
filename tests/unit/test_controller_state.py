from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amo_dist.config import AMOConfig
from amo_dist.schedule.amo import AMOPolicy
from amo_dist.schedule.plan import Plan
from amo_dist.state.control import Control, control_record, restore
from tests import spectra
from tests.held import Held
from tests.unit.checkpoint_runs import JUNK, paths
from tests.unit.controller_runs import (
    BOTH,
    CONFIG,
    MEASURED,
    REGISTRY,
    controller,
    planned,
)


@pytest.mark.parametrize("config", BOTH)
@settings(deadline=None, max_examples=40)
@given(data=st.data(), num_observations=st.integers(0, 3), adopt=st.booleans())
def test_state_round_trips_bit_for_bit(
    config: AMOConfig, data: Any, num_observations: int, adopt: bool
) -> None:
    ell = st.one_of(st.floats(1e-12, 1.0), st.just(math.nan))
    source = controller(config)
    for step in [2, 4, 6][:num_observations]:
        spectra.record(source, step, {name: data.draw(ell) for name in source.sample(step)})
    if source.plan_due() and adopt:
        source.adopt_plan(source.make_plan())
    state = json.loads(json.dumps(source.state_dict()))
    for bind_first in (True, False):
        restored = Held(AMOPolicy(config))
        if bind_first:
            restored.bind(REGISTRY)
        restored.load_state_dict(state)
        restored.bind(REGISTRY)
        assert restored.observations == source.observations
        assert restored.plan == source.plan
        assert restored.state_dict() == source.state_dict()
        if source.plan is not None:
            assert all(restored.state_at(s) == source.state_at(s) for s in range(1, 12))
        elif num_observations == 3:
            assert restored.make_plan() == source.make_plan()


STATE = planned().state_dict()
STATES = [(CONFIG, STATE), (MEASURED, planned(MEASURED).state_dict())]


PLAN_DEFAULTS = {
    "criterion": "projected",
    "num_matrices": None,
    "measured": None,
    "weights": None,
}


@settings(deadline=None, max_examples=100)
@given(
    data=st.data(),
    source=st.sampled_from(STATES),
    bound=st.booleans(),
)
def test_corrupted_state_raises_only_value_errors(
    data: Any, source: tuple[AMOConfig, dict[str, Any]], bound: bool
) -> None:
    """Without a digest, which a whole checkpoint has: what is well formed may pass."""
    config, state = source[0], copy.deepcopy(source[1])
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(paths(state)))
        parent = state
        for key in path[:-1]:
            parent = parent[key]
        action = data.draw(st.sampled_from(["replace", "delete", "add"]))
        if action == "replace":
            parent[path[-1]] = data.draw(JUNK)
        elif action == "delete":
            del parent[path[-1]]
        elif isinstance(parent, dict):
            parent[data.draw(st.one_of(st.text(max_size=3), st.integers()))] = data.draw(JUNK)
        else:
            parent.append(data.draw(JUNK))
        if not state.get("observations") and not state.get("plan"):
            break
    target = Held(AMOPolicy(config))
    if bound:
        target.bind(REGISTRY)
    before = target.state_dict()
    failure = ""
    try:
        target.load_state_dict(state)
    except ValueError as error:
        failure = str(error)
    if failure:
        assert ": found " in failure
        assert "\n" not in failure
        assert target.state_dict() == before
    else:
        # What is accepted is in force exactly, and saved again exactly; what lacks is at its
        # default.
        whole = {**Held(AMOPolicy(config)).state_dict(), **state}
        if whole["plan"] is not None:
            whole["plan"] = {**PLAN_DEFAULTS, **whole["plan"]}
        assert target.state_dict() == whole
        if bound and target.plan is not None:
            assert all(map(target.state_at, range(1, 30)))


def changed(**changes: Any) -> dict[str, Any]:
    state = copy.deepcopy(STATE)
    for dotted, value in changes.items():
        *parents, last = dotted.split("__")
        node: Any = state
        for key in parents:
            node = node[int(key)] if key.isdigit() else node[key]
        node[int(last) if last.isdigit() else last] = value
    return state


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"observations": None}, "observations: found None, expected a list"),
        ({"observations": []}, "plan: found 'a plan', expected null without observations"),
        ({"observations__0__step": True}, r"observations\[0\]\.step: found True, expected an int"),
        ({"observations__1__more": 1}, r"observations\[1\]\.more: found 'this key', expected only"),
        (
            {"observations__1__ell": {"attn_q": None}},
            r"observations\[1\]\.num_sampled: found \['attn_q', .*, expected the groups of ell",
        ),
        (
            {"observations__1__ell__expert": (3.0).hex()},
            r"observations\[1\]\.ell\.expert: found .*, expected a float in \(0, 1\]",
        ),
        (
            {"observations__0__ell": {"attn_q": None, "": None}},
            r"observations\[0\]\.ell: found '', expected a non-empty string",
        ),
        ({"plan__allocation": [6, 5]}, r"plan\.allocation: found \(6, 5\), expected one entry"),
        ({"plan__base_steps": 10**20}, r"plan\.base_steps: found 10+, .* >= 1 and <= 10000"),
        ({"plan__planner": "best"}, r"plan\.planner: found 'best', expected one of 'measured'"),
        (
            {"plan__operator_types": ["mlp_down", "attn_q", "expert"]},
            r"plan\.operator_types: found .*, expected the operator types \['attn_q'",
        ),
        ({"plan__max_steps": 2}, r"plan\.curves\[0\]: found .*, expected a list of 0"),
        (
            {"plan__allocation__2": 8},
            r"plan\.allocation\[2\]: found 8, expected an integer >= 3 and <= 7",
        ),
        ({"plan__measured": None, "plan__criterion": "update"}, r"plan\.criterion: found 'update"),
        (
            {"plan__measured__1__ells": [(0.5).hex()]},
            r"plan\.measured\[1\]\.residuals: found .*, expected a list of 1",
        ),
        (
            {
                f"plan__measured__1__{key}": [(0.5).hex()]
                for key in ("ells", "residuals", "distances")
            },
            r"plan\.measured\[1\]: found '3 to 3 steps', expected 3 to 7 steps",
        ),
    ],
)
def test_each_corruption_is_named(changes: dict[str, Any], message: str) -> None:
    state = changed(**changes)
    target = controller()
    with pytest.raises(ValueError, match=message):
        target.load_state_dict(state)
    assert (target.observations, target.plan) == ((), None)


@pytest.mark.parametrize(
    "changes",
    [
        {"observations__1__ell__expert": (0.5).hex()},
        {"plan__budget": 16},
        {"plan__allocation": [3, 5, 7]},
    ],
)
def test_an_edited_state_fails_by_its_digest(changes: dict[str, Any]) -> None:
    """All of it is well formed: without the digest a run would go on otherwise than it was."""
    policy = AMOPolicy(CONFIG)
    record = control_record(Control(7, 0, CONFIG, policy, planned().state))
    assert policy.to_dict(restore(record, CONFIG, policy).state) == STATE
    record["policy"] = changed(**changes)
    with pytest.raises(ValueError, match=r"control\.policy_digest: found .*, expected .*edited"):
        restore(record, CONFIG, policy)


def test_nesting_past_the_recursion_limit_is_a_value_error() -> None:
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    for observations, plan in ((deep, None), (STATE["observations"], deep)):
        with pytest.raises(ValueError, match=r": found \[\[.*, expected a mapping"):
            controller().load_state_dict({**STATE, "observations": observations, "plan": plan})
    curves = changed(plan__curves=deep)
    with pytest.raises(
        ValueError, match=r"plan\.curves\[0\]\[0\]: found \[\[.*, expected a finite"
    ):
        controller().load_state_dict(curves)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "null", "NaN", None, b"{}"])
def test_a_payload_that_is_no_plan_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match=r"plan: found .*, expected"):
        Plan.from_json(text)


def test_a_state_of_other_operator_types_is_refused_when_the_registry_comes() -> None:
    restored = Held(AMOPolicy(CONFIG))
    restored.load_state_dict(STATE)
    with pytest.raises(
        ValueError, match=r"observations: found .*, expected the operator types \['attn_q'\]"
    ):
        restored.bind(REGISTRY[:5])


def test_an_empty_registry_is_refused() -> None:
    with pytest.raises(ValueError, match=r"registry: found .*, expected at least one matrix"):
        Held(AMOPolicy(CONFIG)).bind([])
