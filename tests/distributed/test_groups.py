"""Process groups that the optimizer makes itself, among those that a program has made before."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from amo_dist import Muon, param_groups
from tests.distributed import models
from tests.distributed.harness import Ranks

NAME = "layers.0.attention.wq.weight"


def step_on_some_ranks(rank: int, world_size: int) -> list[tuple[int, ...]]:
    """A matrix on two mesh axes over all ranks but the last; ranks 0 and 1 have a group more."""
    dist.new_group([0, 1])
    mesh = DeviceMesh("cpu", torch.arange(world_size - 1).unsqueeze(0))
    model = models.plain_model({NAME: (6, 4)})
    if rank < world_size - 1:
        weight, placements = model.get_parameter(NAME).detach(), [Replicate(), Shard(0)]
        weight = distribute_tensor(weight, mesh, placements, src_data_rank=None)
        model = models.build({NAME: nn.Parameter(weight)})
    optimizer = Muon(param_groups(model))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert optimizer.world is not None
    return list(optimizer.world.groups_by_ranks)


def test_ranks_may_belong_to_different_numbers_of_groups(run_on: Ranks) -> None:
    # PyTorch names a group that its members make alone after the number each of them has.
    assert run_on(4, fresh=True)(step_on_some_ranks) == [[(0, 1, 2)]] * 3 + [[(3,)]]
