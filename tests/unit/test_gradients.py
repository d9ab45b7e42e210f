"""The bound on gradients, below which no state overflows, and steps that it skips."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from amo_dist import AdaMuon, Muon, NonFiniteGradientError, param_groups
from amo_dist.engine.ballot import LARGEST_GRADIENT
from tests import runs
from tests.distributed import models
from tests.simulated_device import simulated_device


@pytest.mark.parametrize("kind", [Muon, AdaMuon])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16, torch.float64])
def test_the_largest_gradient_leaves_state_finite(kind: type[Muon], dtype: torch.dtype) -> None:
    model = nn.Linear(4, 4).to(dtype)
    optimizer = kind(param_groups(model, patterns={"weight": "mlp_up"}), lr=0.1, eps=1e-4)
    most = torch.finfo(dtype).max
    for _ in range(50):
        model.weight.grad = torch.full_like(model.weight, min(LARGEST_GRADIENT, most))
        model.bias.grad = torch.full_like(model.bias, math.sqrt(most) / 2.1)
        optimizer.step()
    for state in optimizer.state.values():
        assert all(value.isfinite().all() for value in state.values())
    model.bias.grad *= 4
    with pytest.raises(NonFiniteGradientError, match="bias"):
        optimizer.step()


def test_a_skipped_observation_is_invalid_and_planning_goes_on() -> None:
    with simulated_device() as device:
        model, optimizer = runs.make(device="cuda", nonfinite="skip_step")
        state = [value for own in optimizer.state.values() for value in own.values()]
        for step in range(1, 9):
            models.set_gradients(model, 1, step)
            if step == 2:
                model.get_parameter(runs.WQ).grad.fill_(math.nan)
            optimizer.step()
            kept = [*model.parameters(), *(p.grad for p in model.parameters()), *state]
            assert device.held_bytes(without=kept) < 256, step  # flags and norms
        assert optimizer.metrics()["amo/invalid_observations"] == 3
        first, second = optimizer.control_state_dict()["source"]["observations"]
    assert first["ell"] == {"attn_q": None, "mlp_gate": None}
    assert None not in second["ell"].values()
    assert optimizer.phase == "locked"
