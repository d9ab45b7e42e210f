"""Private names of PyTorch, so that a new version of it can break this file alone."""

from __future__ import annotations

import datetime
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo as disable_dynamo
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

__all__ = ["AsyncCollectiveTensor", "StridedShard", "disable_dynamo"]

# Placements of a DTensor; ``placements`` takes ten times as long, for hundreds of parameters.
placements_of = operator.attrgetter("_spec.placements")
# Local tensor of a DTensor as it is, without autograd and without a wait.
local_of = operator.attrgetter("_local_tensor")


def all_gather_single(
    output: Tensor, own: Tensor, group: dist.ProcessGroup, *, async_op: bool
) -> Any:
    """``torch.distributed.all_gather_single``, which older versions name otherwise."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, own, group=group, async_op=async_op)


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that a mesh is a slice of; itself where it is no slice."""
    root: DeviceMesh = mesh._get_root_mesh()
    return root


def process_groups() -> list[dist.ProcessGroup]:
    """All process groups with this rank in them, in the order in which they were made."""
    return [*dist.distributed_c10d._world.pg_map]


def group_timeout(group: dist.ProcessGroup, device: torch.device) -> datetime.timedelta | None:
    """Time after which a collective of the group fails on a device; None where PyTorch hides it."""
    backend = group._get_backend(device)
    timeout: datetime.timedelta | None = getattr(backend.options, "_timeout", None)
    return timeout


def load_hooks(
    optimizer: torch.optim.Optimizer,
) -> tuple[Iterable[Callable[..., Any]], Iterable[Callable[..., Any]]]:
    """Hooks that a user registered for before and for after ``load_state_dict``."""
    before = optimizer._optimizer_load_state_dict_pre_hooks
    after = optimizer._optimizer_load_state_dict_post_hooks
    return before.values(), after.values()
