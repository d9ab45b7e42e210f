"""Whole runs with random settings: saved and resumed anywhere, they are the run that went through.

A run observes and plans; its settings change on resume. Bad observations, skipped steps and
matrices without a gradient are among it.
"""

from __future__ import annotations

import copy
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


def rate(step: int) -> float:
    """A learning rate that depends on nothing else: it falls, rises, stays, and is zero."""
    return random.Random(f"rate {step // 2}").choice([0.0, 1e-4, 2e-4, 5e-4, 1e-3])


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
