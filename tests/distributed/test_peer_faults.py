"""Faults of optimizer state that sharded optimizers have had, each with the test that rules it out.

Others stand where their subject does: key sets under PyTorch's helpers and resumption to the last
bit in ``test_checkpoint_dcp``, ranks that go on from different states in ``test_exchange``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from amo_dist import AMO, AMOConfig, param_groups
from amo_dist.distributed.layout import local_tensor
from tests.distributed import models
from tests.distributed.harness import Ranks

CONFIG = AMOConfig(observe_until=4, observe_every=2, sample_size=2, transition_steps=3)
SHAPES = models.shapes()
MATRICES = tuple(models.types())
SEED = 5
WQ = "layers.0.attention.wq.weight"
ONE_ROW = "layers.0.attention.wv.weight"


def make(layout: str) -> tuple[nn.Module, AMO]:
    model = models.make_model(layout, SHAPES)
    group = dist.group.WORLD if layout == "plain" else None
    return model, AMO(param_groups(model), lr=1e-2, config=CONFIG, process_group=group)


def train(
    model: nn.Module, optimizer: AMO, steps: int, missing: frozenset[str] = frozenset()
) -> None:
    for step in range(1, steps + 1):
        models.set_gradients(model, SEED, step, missing=missing)
        optimizer.step()


def momentum(model: nn.Module, optimizer: AMO, name: str) -> Tensor:
    """This rank's part."""
    return local_tensor(optimizer.state[model.get_parameter(name)]["momentum_buffer"])


# ------------------------------------------------------------------ keys


def save_and_load(rank: int, world_size: int, folder: str, steps: int) -> tuple[list[str], bool]:
    """Keys of this rank, and whether all it saved came back."""
    model, optimizer = make("fsdp")
    # Never a gradient for a matrix of one row, of which two ranks hold nothing, and for a norm.
    train(model, optimizer, steps, frozenset({ONE_ROW, "norm.weight"}))
    saved: dict[str, Any] = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(saved, checkpoint_id=folder)
    resumed, other = make("fsdp")
    loaded: dict[str, Any] = {"optimizer": get_optimizer_state_dict(resumed, other)}
    dcp.load(loaded, checkpoint_id=folder)
    set_optimizer_state_dict(resumed, other, loaded["optimizer"])
    came_back = [
        torch.equal(local_tensor(found), local_tensor(expected))
        for params in zip(resumed.parameters(), model.parameters(), strict=True)
        for found, expected in zip(
            other.state[params[0]].values(), optimizer.state[params[1]].values(), strict=True
        )
    ]
    assert local_tensor(model.get_parameter(ONE_ROW)).numel() == (8 if rank == 0 else 0)
    state: dict[str, Any] = saved["optimizer"]["state"]
    keys = [f"{name}.{key}" for name, values in state.items() for key in values]
    return sorted(keys), all(came_back)


@pytest.mark.parametrize("steps", [0, 2])
def test_keys_do_not_depend_on_what_a_rank_holds_or_has_seen(
    run_on: Ranks, tmp_path: Path, steps: int
) -> None:
    """State that comes into being with its first gradient, or only where there are rows, gives
    ranks different keys, and a save in which all ranks take part then waits for ever."""
    found = run_on(3, timeout=60.0)(save_and_load, str(tmp_path), steps)
    keys = [f"{name}.momentum_buffer" for name in MATRICES]
    for name in SHAPES.keys() - set(MATRICES):
        keys += [f"{name}.{key}" for key in ("exp_avg", "exp_avg_sq", "step")]
    assert found == [(sorted(keys), True)] * 3


# ------------------------------------------------------------------ momentum


def own_file(rank: int, world_size: int, layout: str) -> tuple[int, list[str]]:
    """How many matrices this rank holds a part of, and those whose momentum its file lacks."""
    model, optimizer = make(layout)
    train(model, optimizer, 2)
    resumed, other = make(layout)
    saved = models.through_a_file(optimizer.state_dict(), weights_only=False)
    other.load_state_dict(saved)
    held, lost = 0, []
    for name in MATRICES:
        first, second = (models.gradient(SEED, step, name, SHAPES[name]) for step in (1, 2))
        expected = models.place_like(first * CONFIG.momentum + second, resumed.get_parameter(name))
        held += local_tensor(expected).numel() > 0
        if not torch.equal(momentum(resumed, other, name), local_tensor(expected)):
            lost.append(name)
    return held, lost


@pytest.mark.parametrize(("layout", "world_size"), [("plain", 2), ("fsdp", 3), ("hsdp", 4)])
def test_the_file_of_every_rank_holds_its_momentum(
    run_on: Ranks, layout: str, world_size: int
) -> None:
    """Momentum that lives on the rank that orthogonalizes a matrix, or that is only gathered for
    the first rank, is zero in what the other ranks save."""
    results = run_on(world_size)(own_file, layout)
    assert [lost for _, lost in results] == [[]] * world_size
    # All of them where nothing is sharded; else at least those with a row for every rank.
    fewest = len(MATRICES) if layout == "plain" else 4 * models.NUM_LAYERS
    assert all(held >= fewest for held, _ in results)
