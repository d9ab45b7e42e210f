"""Random models laid out over simulated ranks, for property tests; no process is started."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from amo_dist.distributed.layout import Matrix, TensorLayout, make_matrix, mesh_layout
from amo_dist.operators.views import Fused, MatrixView, cut_views
from tests.distributed.models import cut

MAX_RANKS = 64


@dataclasses.dataclass(frozen=True)
class Model:
    """Tensors on one mesh, and the matrices in them."""

    mesh: torch.Tensor
    placements: tuple[Any, ...]
    tensors: tuple[TensorLayout, ...]
    views: tuple[tuple[MatrixView, ...], ...]
    matrices: tuple[Matrix, ...]

    @property
    def ranks(self) -> list[int]:
        return [int(rank) for rank in self.mesh.flatten().tolist()]


def placements_by_kind(split: int) -> dict[str, tuple[Any, ...]]:
    """Placements as FSDP2 and tensor parallelism of ``split`` ranks write them."""
    return {
        "ddp": (Replicate(),),
        "fsdp": (Shard(0),),
        "hsdp": (Replicate(), Shard(0)),
        "tp_columns": (Shard(0),),
        "tp_rows": (Shard(1),),
        "fsdp_tp_columns": (_StridedShard(0, split_factor=split), Shard(0)),
        "fsdp_tp_rows": (Shard(0), Shard(1)),
        "hsdp_tp_columns": (Replicate(), _StridedShard(0, split_factor=split), Shard(0)),
        "hsdp_tp_rows": (Replicate(), Shard(0), Shard(1)),
        "experts_0": (Shard(0),),
        "experts_1": (Shard(1),),
        "experts_2": (Shard(2),),
        "ep_fsdp": (Shard(0), Shard(1)),
    }


KINDS = tuple(placements_by_kind(1))


def build(
    kind: str,
    mesh: torch.Tensor,
    shapes: list[tuple[int, ...]],
    views: list[tuple[MatrixView, ...]] | None = None,
) -> Model:
    """Lay out tensors; whole matrices, or one for each expert, where no views are given."""
    placements = placements_by_kind(mesh.shape[-1])[kind]
    views = views or [cut_views("x", shape, "attn_q") for shape in shapes]
    tensors = tuple(mesh_layout(shape, mesh, placements) for shape in shapes)
    matrices = tuple(
        make_matrix(f"p{index}{view.suffix}", tensor, index, view.boxes, view.dim)
        for index, tensor in enumerate(tensors)
        for view in views[index]
    )
    return Model(mesh, placements, tensors, tuple(views), matrices)


@st.composite
def meshes(draw: st.DrawFn, axes: int, max_ranks: int = MAX_RANKS) -> torch.Tensor:
    """Ranks in any order: the order of a mesh need not be that of its numbers."""
    sizes: list[int] = []
    for _ in range(axes):
        sizes.append(draw(st.integers(1, max_ranks // math.prod(sizes))))
    first = draw(st.sampled_from([0, 5]))
    ranks = torch.arange(first, first + math.prod(sizes)).view(sizes)
    return ranks.flip(-1) if draw(st.booleans()) else ranks


@st.composite
def fused(draw: st.DrawFn) -> tuple[tuple[int, int], Fused]:
    """Fused query, key and value: rows or columns, in pieces or interleaved, split by heads."""
    groups = draw(st.integers(1, 3))
    head = draw(st.integers(1, 3))
    sizes = (2 * groups * head, groups * head, groups * head)
    other, dim = draw(st.integers(1, 9)), draw(st.sampled_from([0, 1]))
    heads = {"attn_q": 2 * groups} if draw(st.booleans()) else {}
    parts = tuple(zip(("attn_q", "attn_k", "attn_v"), sizes, strict=True))
    shape = (sum(sizes), other) if dim == 0 else (other, sum(sizes))
    return shape, Fused(parts, dim=dim, groups=groups, heads=heads)


@st.composite
def models(draw: st.DrawFn, kinds: tuple[str, ...] = KINDS, max_ranks: int = MAX_RANKS) -> Model:
    """One to four tensors of any size, smaller and larger than the mesh."""
    kind = draw(st.sampled_from(kinds))
    mesh = draw(meshes(len(placements_by_kind(1)[kind]), max_ranks))
    shapes: list[tuple[int, ...]] = []
    views: list[tuple[MatrixView, ...]] = []
    for _ in range(draw(st.integers(1, 4))):
        is_3d = kind.startswith(("experts", "ep"))
        sizes = [draw(st.integers(1, 5))] if is_3d else []
        shape: tuple[int, ...] = (*sizes, draw(st.integers(1, 20)), draw(st.integers(1, 20)))
        target: str | Fused = "attn_q"
        if not is_3d and draw(st.booleans()):
            shape, target = draw(fused())
        shapes.append(shape)
        views.append(cut_views("x", shape, target))
    return build(kind, mesh, shapes, views)


def local_tensor(layout: TensorLayout, whole: torch.Tensor, rank: int) -> torch.Tensor:
    """What ``rank`` holds of a tensor, cut from all of it."""
    return cut(whole, layout.intervals_by_rank[rank])


def cut_view(view: MatrixView, whole: torch.Tensor) -> torch.Tensor:
    """The matrix of a view, cut from all of a tensor."""
    if view.boxes is None:
        return whole
    parts = [whole[tuple(slice(*interval) for interval in box)] for box in view.boxes]
    return torch.cat([part.reshape(part.shape[-2:]) for part in parts], view.dim)
