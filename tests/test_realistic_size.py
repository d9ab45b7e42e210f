"""Sizes that runs have and other tests have not."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from amo_dist import Muon, param_groups
from tests import runs

LONG = "x" * 180
"""Part of a name of 200 characters."""


def make_wide() -> tuple[nn.Module, Muon]:
    """2,000 matrices of long names in 40 groups."""
    torch.manual_seed(0)
    model = nn.Module()
    for number in range(2000):
        model.register_parameter(f"{LONG}_{number:04}", nn.Parameter(torch.randn(3, 2)))
    rates = {rf".*_{number:02}\d\d": 1.0 + number for number in range(20)}
    spared = [r".*[02468]"]
    groups = param_groups(model, patterns={".*": "mlp_up"}, lr_multipliers=rates, no_decay=spared)
    assert len(groups) == 40
    return model, Muon(groups, lr=1e-3)


def test_thousands_of_parameters_in_many_groups_resume() -> None:
    model, optimizer = make_wide()

    def step(model: nn.Module, optimizer: Muon) -> None:
        for number, param in enumerate(model.parameters()):
            param.grad = torch.full((3, 2), 1.0 + number)
        optimizer.step()

    step(model, optimizer)
    twin, other = runs.resume(model, optimizer, make_wide)
    step(model, optimizer)
    step(twin, other)
    assert runs.same(model, twin)


@pytest.mark.parametrize("steps", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_control_state_does_not_grow(steps: int) -> None:
    model, optimizer = runs.make(shapes={runs.WQ: (2, 2)}, ns_guard_every=10)
    runs.train(model, optimizer, 1, 20)
    early = len(json.dumps(optimizer.control_state_dict()))
    for _ in range(20, steps):
        optimizer.step()
    assert len(json.dumps(optimizer.control_state_dict())) <= early + 50  # longer numbers alone
