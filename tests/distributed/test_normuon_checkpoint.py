"""NorMuon through torch.distributed.checkpoint: its moments have not the parameters' shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from amo_dist import NorMuon, param_groups
from tests.distributed import models
from tests.distributed.harness import Ranks

STEPS, SAVED, SEED = 6, 3, 5
SHAPES = models.shapes(models.EVEN_SHAPES)  # FSDP over TP needs even dims


def make(layout: str) -> tuple[nn.Module, NorMuon, dict[str, Any]]:
    """The model, its optimizer, and their state for DCP to write or to fill."""
    model = models.make_model(layout, SHAPES)
    optimizer = NorMuon(param_groups(model), lr=1e-2)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    return model, optimizer, state


def train(model: nn.Module, optimizer: NorMuon, first: int, last: int) -> dict[str, Tensor]:
    for step in range(first, last + 1):
        models.set_gradients(model, SEED, step)
        optimizer.step()
    return {name: models.whole(param) for name, param in model.named_parameters()}


def save(rank: int, world_size: int, layout: str, folder: str) -> dict[str, Tensor]:
    model, optimizer, _ = make(layout)
    train(model, optimizer, 1, SAVED)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.save(state, checkpoint_id=folder)
    return train(model, optimizer, SAVED + 1, STEPS)


def resume(rank: int, world_size: int, layout: str, folder: str) -> dict[str, Tensor]:
    model, optimizer, state = make(layout)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return train(model, optimizer, SAVED + 1, STEPS)


@pytest.mark.parametrize(
    ("layout", "ranks", "other", "others"),
    [("fsdp", 2, "tp_fsdp", 4), ("tp_fsdp", 4, "fsdp", 3)],
)
def test_moments_are_saved_and_laid_out_anew(
    run_on: Ranks, tmp_path: Path, layout: str, ranks: int, other: str, others: int
) -> None:
    folder = str(tmp_path / "checkpoint")
    expected = run_on(ranks)(save, layout, folder)[0]
    for found in run_on(others)(resume, other, folder):
        assert all(torch.equal(found[name], value) for name, value in expected.items())
