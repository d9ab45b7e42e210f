"""Sizes that runs have and other tests have not."""

from __future__ import annotations

import gc
import json

import pytest
from torch import nn

from amo_dist import Muon
from tests import runs

LONG = "x" * 180
"""Part of a name of 200 characters."""


def make_wide() -> tuple[nn.Module, Muon]:
    """2,000 matrices of long names in 40 groups."""
    rates = {rf".*_{number:02}\d\d": 1.0 + number for number in range(20)}
    groups = {"patterns": {".*": "mlp_up"}, "lr_multipliers": rates, "no_decay": [r".*[02468]"]}
    shapes = {f"{LONG}_{number:04}": (3, 2) for number in range(2000)}
    model, optimizer = runs.make(kind=Muon, shapes=shapes, groups=groups)
    assert len(optimizer.param_groups) == 40
    return model, optimizer


def test_thousands_of_parameters_in_many_groups_resume() -> None:
    model, optimizer = make_wide()
    runs.train(model, optimizer, 1, 1)
    twin, other = runs.resume(model, optimizer, make_wide)
    runs.train(model, optimizer, 2, 2)
    runs.train(twin, other, 2, 2)
    assert runs.same(model, twin)


@pytest.mark.parametrize("steps", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_control_state_does_not_grow(steps: int) -> None:
    model, optimizer = runs.make(shapes={runs.WQ: (2, 2)}, ns_guard_every=10)
    runs.train(model, optimizer, 1, 20)
    early = len(json.dumps(optimizer.control_state_dict()))
    num_objects = len(gc.get_objects())
    for _ in range(20, steps):
        optimizer.step()
    assert len(gc.get_objects()) < num_objects + steps // 2  # no history in memory
    assert len(json.dumps(optimizer.control_state_dict())) <= early + 50  # longer numbers alone
