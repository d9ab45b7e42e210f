"""Under ``torch.set_default_device`` everything lies where the parameters do, or on the CPU."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from amo_dist import OPTIMIZER_NAMES, AMOConfig, MuonConfig, make_optimizer, param_groups
from tests import runs
from tests.distributed import models


def train(name: str, device: str | None) -> dict[str, Tensor]:
    model = models.plain_model(models.shapes())
    fields = {"ns_guard_every": 1}
    phases = {"observe_until": 2, "observe_every": 1, "transition_steps": 1}
    config = AMOConfig(**fields, **phases) if name == "AMO" else MuonConfig(**fields)
    with nullcontext() if device is None else torch.device(device):
        optimizer = make_optimizer(name, param_groups(model), config=config)
    for step in range(1, 5):
        models.set_gradients(model, 0, step)
        with nullcontext() if device is None else torch.device(device):
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
    return runs.weights(model)


@pytest.mark.parametrize("name", [name for name in OPTIMIZER_NAMES if name != "AdamW"])
def test_the_default_device_has_no_part(name: str) -> None:
    assert runs.equal(train(name, "meta"), train(name, None))
