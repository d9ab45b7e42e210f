"""What trainers do to optimizers on ranks: copies, swapped parameters, faults on some ranks.

An optimizer that is built before the model is sharded follows a swap of its parameters, and else
refuses to step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from amo_dist import AMO, AdaMuon, AMOConfig, Muon, NorMuon, param_groups
from tests import runs
from tests.distributed import models
from tests.distributed.harness import Ranks
from tests.distributed.test_ranks import raised

pytestmark = pytest.mark.slow

CONFIG = AMOConfig(**runs.PHASES)
MAKE: dict[str, Callable[[Any], Muon]] = {
    "Muon": Muon,
    "NorMuon": NorMuon,
    "AdaMuon": AdaMuon,
    "AMO": lambda groups: AMO(groups, config=CONFIG),
}
WQ = "layers.0.attention.wq.weight"


def shard(model: nn.Module) -> nn.Module:
    return models.shard(model, init_device_mesh("cpu", (dist.get_world_size(),)))


def prepare(model: nn.Module, optimizer: Muon) -> nn.Module:
    """Shard and swap as Accelerate does: placeholders in between, and lists of its own at last."""
    before = {param.data_ptr(): name for name, param in model.named_parameters()}
    optimizer.load_state_dict(optimizer.state_dict())
    for group in optimizer.param_groups:
        for index, param in enumerate(group["params"]):
            group["params"][index] = torch.empty(1)
            group["params"][index].data_ptr = param.data_ptr()
    shard(model)
    for group in optimizer.param_groups:
        names = [before[placeholder.data_ptr] for placeholder in group["params"]]
        group["params"] = [model.get_parameter(name) for name in names]
    return model


def prepared(
    rank: int, world_size: int, name: str, steps: int, flat: bool
) -> tuple[bool, bool, str]:
    """After so many steps, whose checkpoint goes into the swapped parameters."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    expected = shard(models.plain_model(models.shapes()))
    reference = MAKE[name](param_groups(expected))
    runs.train(expected, reference, 1, steps)
    model = models.plain_model(models.shapes())
    optimizer = MAKE[name](param_groups(model))
    prepare(model, optimizer)
    if steps:
        with torch.no_grad():
            for own, param in expected.named_parameters():
                model.get_parameter(own).copy_(param)
        state = copy.deepcopy(get_optimizer_state_dict(expected, reference, options=options))
        get_optimizer_state_dict(model, optimizer, options=options)  # it is read into this one
        set_optimizer_state_dict(model, optimizer, state, options=options)
    runs.train(model, optimizer, steps + 1, 9)
    runs.train(expected, reference, steps + 1, 9)
    momentum = optimizer.state[model.get_parameter(WQ)]["momentum_buffer"]
    return runs.same(model, expected), isinstance(momentum, DTensor), optimizer.phase


@pytest.mark.parametrize(
    ("name", "steps", "flat"),
    [*((name, 0, False) for name in MAKE), ("AMO", 5, False), ("AMO", 5, True)],
)
def test_parameters_sharded_after_construction_are_trained(
    run_on: Ranks, name: str, steps: int, flat: bool
) -> None:
    phase = "locked" if name == "AMO" else "uniform"
    assert run_on(2)(prepared, name, steps, flat) == [(True, True, phase)] * 2


def gradients_on_one_rank(rank: int, world_size: int) -> bool:
    """Of each rank's own tensors those of another rank may have the only gradients."""
    model = models.plain_model({WQ: (12, 8)})
    optimizer = Muon(param_groups(model))
    before = runs.weights(model)
    if rank == 0:
        models.set_gradients(model, 1, 1)
    optimizer.step()
    return torch.equal(before[WQ], model.get_parameter(WQ))


def test_a_gradient_on_one_rank_is_one(run_on: Ranks) -> None:
    assert run_on(2)(gradients_on_one_rank) == [False, True]


def no_matrices(rank: int, world_size: int, shapes: dict[str, tuple[int, ...]]) -> str:
    """As between stages of a pipeline: a rank may have none."""
    model = models.plain_model({"norm.weight": (8,)} if rank else shapes)
    optimizer = Muon(param_groups(model))
    return raised(lambda: runs.train(model, optimizer, 1, 1))


def test_a_rank_may_have_no_matrix_and_the_world_may_not(run_on: Ranks) -> None:
    assert run_on(2)(no_matrices, {WQ: (12, 8)}) == ["", ""]
    for error in run_on(2)(no_matrices, {"tok_embeddings.weight": (5, 8)}):
        assert error.startswith("ValueError: params: found no matrix among 1 parameters (")
        assert "allow_no_matrices=True" in error
