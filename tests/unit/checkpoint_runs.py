"""Short runs of AMO through all phases, for tests of saving and loading."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amo_dist import AMO, AMOConfig, Muon, param_groups
from tests.distributed import models

FIELDS: dict[str, Any] = {
    "observe_until": 4,
    "observe_every": 2,
    "sample_size": 2,
    "transition_steps": 3,
}
SHAPES = {
    "tok_embeddings.weight": (5, 8),
    "layers.0.attention.wq.weight": (12, 8),
    "layers.1.attention.wq.weight": (12, 8),
    "layers.0.feed_forward.w1.weight": (13, 8),
    "norm.weight": (8,),
}
WQ = "layers.0.attention.wq.weight"
STEPS = 10
BAD_RATES = [
    ("lr", float("nan"), "nan"),
    ("lr", -1.0, "-1.0"),
    ("lr", torch.tensor(torch.nan), r"tensor(nan)"),
    ("lr", None, "None"),
    ("lr", torch.ones(2), "tensor([1., 1.])"),
    ("lr_multiplier", -0.5, "-0.5"),
    ("lr_multiplier", "0.1", "'0.1'"),
    ("weight_decay", float("inf"), "inf"),
    ("betas", (0.9, 1.0), "(0.9, 1.0)"),
    ("betas", 0.9, "0.9"),
    ("eps", -1.0, "-1.0"),
    ("momentum", 1.0, "1.0"),
    ("momentum", None, "None"),
    ("nesterov", 10.5, "10.5"),
]
"""A field of a parameter group, what no training can mean, and how the error tells it."""


def make(dtype: torch.dtype = torch.float32, **fields: Any) -> tuple[nn.Module, AMO]:
    model = models.plain_model(SHAPES).to(dtype)
    return model, AMO(param_groups(model), lr=1e-2, config=AMOConfig(**{**FIELDS, **fields}))


def train(model: nn.Module, optimizer: Muon, first: int, last: int) -> None:
    for step in range(first, last + 1):
        models.set_gradients(model, 1, step)
        optimizer.step()


def everything(model: nn.Module, optimizer: Muon) -> list[Tensor]:
    state = [value for values in optimizer.state.values() for value in values.values()]
    return [tensor.detach().clone() for tensor in [*model.parameters(), *state]]


def save(**fields: Any) -> dict[str, Any]:
    """The state after five steps."""
    model, optimizer = make(**fields)
    train(model, optimizer, 1, 5)
    return copy.deepcopy(optimizer.state_dict())


def refusal(state: dict[str, Any], **fields: Any) -> str:
    """The error of a load, after which nothing has changed."""
    model, optimizer = make(**fields)
    train(model, optimizer, 1, 3)
    before, control = everything(model, optimizer), optimizer.control_state_dict()
    groups = copy.deepcopy([{**g, "params": None} for g in optimizer.param_groups])
    source, config = optimizer.source, optimizer.config
    with pytest.raises(ValueError, match=": ") as caught:
        optimizer.load_state_dict(state)
    assert all(map(torch.equal, everything(model, optimizer), before))
    assert optimizer.control_state_dict() == control
    assert optimizer.source is source
    assert optimizer.config is config
    assert [{**g, "params": None} for g in optimizer.param_groups] == groups
    # It still works.
    train(model, optimizer, 4, 5)
    return str(caught.value)
