"""A small model and its optimizer, for tests of what programs do to an optimizer in use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from amo_dist import OPTIMIZER_NAMES, Muon, param_groups
from tests.distributed import models

WQ, W1 = "layers.0.attention.wq.weight", "layers.0.feed_forward.w1.weight"
NORM = "layers.0.attention_norm.weight"
SHAPES = {"tok_embeddings.weight": (5, 8), WQ: (12, 8), W1: (13, 8), NORM: (8,)}
FAMILY = [name for name in OPTIMIZER_NAMES if name != "AdamW"]


def muon(model: nn.Module, **options: Any) -> Muon:
    return Muon(param_groups(model), lr=1e-2, **options)


def train(model: nn.Module, optimizer: Muon, first: int = 1, last: int = 3) -> None:
    for step in range(first, last + 1):
        models.set_gradients(model, 1, step)
        optimizer.step()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(each, other.get_parameter(name)) for name, each in weights(one).items())
