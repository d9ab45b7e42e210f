"""An optimizer that is built before the model is sharded follows a swap of its parameters."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from amo_dist import AMO, AMOConfig, Muon, NorMuon, param_groups
from tests import runs
from tests.distributed import models
from tests.distributed.harness import Ranks
from tests.distributed.test_ranks import raised
from tests.runs import WQ

pytestmark = pytest.mark.slow


def prepare(model: nn.Module, optimizer: Muon) -> None:
    """Shard and swap as Accelerate does: placeholders in between, and lists of its own at last."""
    before = {param.data_ptr(): name for name, param in model.named_parameters()}
    optimizer.load_state_dict(optimizer.state_dict())
    for group in optimizer.param_groups:
        for index, param in enumerate(group["params"]):
            group["params"][index] = torch.empty(1)
            group["params"][index].data_ptr = param.data_ptr()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    models.shard(model, mesh)
    for group in optimizer.param_groups:
        names = [before[placeholder.data_ptr] for placeholder in group["params"]]
        group["params"] = [model.get_parameter(name) for name in names]


def prepared(rank: int, world_size: int, kind: type[Muon], steps: int) -> tuple[bool, bool]:
    """After so many steps, whose checkpoint goes into the swapped parameters."""
    expected, reference = runs.make("fsdp", kind)
    runs.train(expected, reference, 1, steps)
    model = models.plain_model(runs.SHAPES)
    config = AMOConfig(**runs.PHASES) if kind is AMO else None
    optimizer = kind(param_groups(model), lr=1e-2, config=config)
    prepare(model, optimizer)
    if steps:
        model.load_state_dict(expected.state_dict())
        state = copy.deepcopy(get_optimizer_state_dict(expected, reference))
        get_optimizer_state_dict(model, optimizer)  # it is read into this one
        set_optimizer_state_dict(model, optimizer, state)
    runs.train(model, optimizer, steps + 1, 9)
    runs.train(expected, reference, steps + 1, 9)
    momentum = optimizer.state[model.get_parameter(WQ)]["momentum_buffer"]
    return runs.same(model, expected), isinstance(momentum, DTensor)


@pytest.mark.parametrize(("kind", "steps"), [(NorMuon, 0), (AMO, 0), (AMO, 5)])
def test_parameters_sharded_after_construction_are_trained(
    run_on: Ranks, kind: type[Muon], steps: int
) -> None:
    assert run_on(2)(prepared, kind, steps) == [(True, True)] * 2


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
