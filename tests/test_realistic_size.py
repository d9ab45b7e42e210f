"""Sizes that runs have and other tests have not."""

from __future__ import annotations

import gc
import json

import pytest

from tests import runs


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
