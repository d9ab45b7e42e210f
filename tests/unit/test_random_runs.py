"""Whole runs with random settings: saved and resumed anywhere, they are the run that went through.

A run observes and plans; its settings change on resume. Bad observations, skipped steps and
matrices without a gradient are among it.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from amo_dist import AMO, AMOConfig, param_groups
from amo_dist.schedule.amo import AMOPolicy
from amo_dist.state.control import Control, control_record, restore, to_text
from tests import spectra
from tests.held import Held
from tests.unit.controller_runs import REGISTRY
from tests.unit.test_ns_guard import Model

STEPS = 24
Events = Mapping[int, Any]


@st.composite
def configs(draw: st.DrawFn, **fields: Any) -> AMOConfig:
    every, length = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    found = {
        "observe_every": every,
        "observe_until": every * draw(st.integers(1, 4)),
        "transition_steps": length,
        "observe_only": draw(st.integers(0, 3)) == 0,
        "sample_size": draw(st.integers(1, 6)),
        "planner": draw(st.sampled_from(["measured", "paper"])),
        "shrinkage": draw(st.sampled_from([0.0, 0.7, 1.0])),
        "budget_ratio": draw(st.sampled_from([0.8, 1.0, 1.2])),
        "seed": draw(st.integers(0, 3)),
    }
    return AMOConfig(**{**found, **fields})


def at_some_steps(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[int, Any]]:
    return st.dictionaries(st.integers(1, STEPS), values, max_size=5)


def observed(name: str, step: int) -> float:
    """An ell that depends on nothing else; one in four is none."""
    generator = random.Random(f"{name} {step}")
    good = 10 ** generator.uniform(-8, -0.1)
    return generator.choice([good, good, good, math.nan])


def rate(step: int) -> float:
    """A learning rate that depends on nothing else: it falls, rises, stays, and is zero."""
    return random.Random(f"rate {step // 2}").choice([0.0, 1e-4, 2e-4, 5e-4, 1e-3])


def take(policy: Held, step: int) -> tuple[Any, ...]:
    """One optimizer step of a policy; what it did."""
    applied = policy.phase(step), dict(policy.schedules(step)), policy.digest(step)
    sample = policy.sample(step)
    if sample:
        spectra.record(policy, step, {name: observed(name, step) for name in sample})
    if policy.plan_due():
        policy.adopt_plan(policy.make_plan())
    return *applied, sample, policy.metrics(step)


def resumed(policy: Held, steps_taken: int, config: AMOConfig, binds_first: bool) -> Held:
    """Another policy that goes on from what this one saved, as an optimizer makes it."""
    saved = control_record(Control(steps_taken, 0, policy.config, policy.policy, policy.state))
    fresh = AMOPolicy(config)
    groups = fresh.groups(REGISTRY) if binds_first else None
    record = json.loads(to_text(saved))
    control = restore(record, config, fresh, groups)
    assert control.steps_taken == steps_taken
    assert isinstance(control.policy, AMOPolicy)
    assert control.policy.config == control.config
    return Held(control.policy, REGISTRY, control.state)


CHANGES = st.tuples(configs(), st.sampled_from(["replan", "keep_checkpoint"]))


@settings(deadline=None, max_examples=20)
@given(
    config=configs(),
    changes=at_some_steps(CHANGES),
    saves=at_some_steps(st.booleans()),
)
def test_a_policy_resumed_anywhere_goes_on_as_it_would_have(
    config: AMOConfig, changes: Events, saves: Events
) -> None:
    straight, broken = Held(AMOPolicy(config)), Held(AMOPolicy(config))
    for policy in (straight, broken):
        policy.bind(REGISTRY)
    for step in range(1, STEPS + 1):
        if step in changes:
            other, rule = changes[step]
            other = dataclasses.replace(other, on_config_change=rule)
            straight = resumed(straight, step - 1, other, True)
            broken = resumed(broken, step - 1, other, False)
        elif step in saves:
            broken = resumed(broken, step - 1, broken.config, saves[step])
        did = [take(policy, step) for policy in (straight, broken)]
        assert did[0] == did[1], step
        assert broken.state_dict() == straight.state_dict()


@settings(deadline=None, max_examples=20)
@given(config=configs())
def test_a_glide_begins_where_the_run_is_and_ends_at_the_plan(config: AMOConfig) -> None:
    policy = Held(AMOPolicy(config))
    policy.bind(REGISTRY)
    planned_at = None
    for step in range(1, STEPS + 1):
        last, plan = policy.state_at(max(step - 1, 1)), policy.plan
        take(policy, step)
        before = policy.state_at(step)
        if policy.plan is not plan:
            planned_at = step
            assert last == before
        elif plan is not None and policy.phase(step) == "locked":
            assert planned_at is not None
            assert step >= planned_at + config.transition_steps
            planned = zip(plan.allocation, plan.ell_target, strict=True)
            assert before == dict(zip(plan.operator_types, planned, strict=True))


# ---------------------------------------------------------------- optimizers


def set_gradients(model: Model, step: int, event: str | None) -> None:
    generator = torch.Generator().manual_seed(step)
    for index, param in enumerate(model.parameters()):
        scale = 10.0 ** ((7 * step + 3 * index) % 5)  # so that what is observed moves
        param.grad = torch.randn(param.shape, generator=generator) * scale
        if step % 4 == 0:
            param.grad = param.grad[:, :1].expand_as(param.grad).clone()
        if index == step % 3 and event is not None:
            param.grad = None if event == "none" else torch.full_like(param, math.nan)


def run(
    config: AMOConfig, events: Events, saves: Events
) -> tuple[list[Tensor], dict[str, Any], list[str]]:
    """Parameters, control state and the phases of a run; at ``saves`` another goes on."""
    model = Model()
    optimizer, phases = AMO(param_groups(model), config=config), []
    for step in range(1, STEPS + 1):
        if step in saves:
            other = Model()
            other.load_state_dict(model.state_dict())
            fresh = AMO(param_groups(other), config=config)
            fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            model, optimizer = other, fresh
        set_gradients(model, step, events.get(step))
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        phases.append(optimizer.phase)
    params = [param.detach().clone() for param in model.parameters()]
    return params, optimizer.control_state_dict(), phases


@pytest.mark.slow
@settings(deadline=None, max_examples=10)
@given(
    config=configs(ns_guard_every=1, nonfinite="skip_step"),
    events=at_some_steps(st.sampled_from(["none", "skip"])),
    saves=at_some_steps(st.booleans()),
)
def test_an_optimizer_resumed_anywhere_goes_on_bit_for_bit(
    config: AMOConfig, events: Events, saves: Events
) -> None:
    """The other is saved and loaded."""
    expected, found = run(config, events, {}), run(config, events, saves)
    assert found[1:] == expected[1:]
    assert all(map(torch.equal, found[0], expected[0]))
