"""Layouts against torch's own chunking: what each rank holds, and which matrix it is part of."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from amo_dist.distributed.layout import make_matrix, mesh_layout
from tests.layouts import KINDS, Model, build, cut_view, local_tensor, meshes, models

few = settings(max_examples=40, deadline=None)
IN_ORDER = tuple(kind for kind in KINDS if not kind.endswith("_tp_columns"))


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(math.prod(shape)).view(shape)


@few
@given(models(kinds=IN_ORDER))
def test_local_shapes_and_offsets_are_torchs(model: Model) -> None:
    coordinates = {int(rank): (model.mesh == rank).nonzero()[0].tolist() for rank in model.ranks}
    for layout in model.tensors:
        whole = numbered(layout.shape)
        for rank, coordinate in coordinates.items():
            shape, offset = _compute_local_shape_and_global_offset(
                layout.shape, tuple(model.mesh.shape), coordinate, model.placements
            )
            local = local_tensor(layout, whole, rank)
            assert layout.local_shape(rank) == tuple(local.shape) == shape
            if local.numel():
                assert local.flatten()[0] == whole[tuple(offset)]


@few
@given(st.data(), st.integers(1, 40), st.sampled_from([2, 3]))
def test_fsdp_over_tensor_parallelism_chunks_the_chunk(
    data: st.DataObject, rows: int, axes: int
) -> None:
    mesh = data.draw(meshes(axes, 24))
    kind = "fsdp_tp_columns" if axes == 2 else "hsdp_tp_columns"
    layout = build(kind, mesh, [(rows, 2)]).tensors[0]
    whole = numbered((rows, 2))
    num_fsdp, num_tp = mesh.shape[-2:]
    empty = whole[:0]
    for rank in mesh.flatten().tolist():
        *_, fsdp, tp = (mesh == rank).nonzero()[0].tolist()
        by_tp = dict(enumerate(whole.chunk(num_tp))).get(tp, empty)
        # A tensor without rows is one chunk without rows.
        expected = dict(enumerate(by_tp.chunk(num_fsdp))).get(fsdp, empty)
        assert torch.equal(local_tensor(layout, whole, rank), expected)


def test_a_strided_shard_that_no_later_axis_explains_keeps_every_other_chunk() -> None:
    layout = mesh_layout((8, 1), torch.arange(2), [_StridedShard(0, split_factor=2)])
    assert local_tensor(layout, numbered((8, 1)), 1).flatten().tolist() == [2, 3, 6, 7]
    first, second = make_matrix("x", layout, 0).regions_by_rank[1]
    assert (first.source[0], first.target[0]) == ((0, 2), (2, 4))
    assert (second.source[0], second.target[0]) == ((2, 4), (6, 8))
    # Another axis cuts the pieces side by side.
    placements = [_StridedShard(0, split_factor=4), Shard(0)]
    layout = mesh_layout((16, 1), torch.arange(4).view(2, 2), placements)
    kept = [local_tensor(layout, numbered((16, 1)), rank).flatten().tolist() for rank in (0, 1)]
    assert kept == [[0, 1, 4, 5], [8, 9, 12, 13]]


@few
@given(models())
def test_the_pieces_of_each_replica_make_up_each_matrix(model: Model) -> None:
    views = [(tensor, view) for tensor, found in enumerate(model.views) for view in found]
    for matrix, (tensor, view) in zip(model.matrices, views, strict=True):
        layout = model.tensors[tensor]
        whole = numbered(layout.shape)
        expected = cut_view(view, whole)
        assert matrix.shape == tuple(expected.shape)
        for replica in matrix.replicas:
            found = torch.full(matrix.shape, -1)
            for rank in replica:
                local = local_tensor(layout, whole, rank)
                pieces = matrix.regions_by_rank.get(rank, ())
                assert matrix.num_held(rank) == sum(piece.num_elements for piece in pieces)
                for piece in pieces:
                    rows, columns = (slice(*interval) for interval in piece.target)
                    assert found[rows, columns].max() == -1  # nobody else put anything here
                    source = local[tuple(slice(*interval) for interval in piece.source)]
                    found[rows, columns] = source.reshape(found[rows, columns].shape)
            assert torch.equal(found, expected)


def test_a_negative_dim_is_counted_from_the_end() -> None:
    last = mesh_layout((8, 4), torch.arange(2), [Shard(-1)])
    assert last.local_shape(0) == (8, 2)


@pytest.mark.parametrize(
    ("lay_out", "message"),
    [
        (lambda: mesh_layout((4, 4), torch.arange(2), [Partial()]), r"placements: found P.*sum"),
        (
            lambda: make_matrix("c", mesh_layout((8, 4, 3, 2), torch.arange(3), [Shard(2)]), 0),
            "expected no shards but along the first two",
        ),
    ],
)
def test_mistakes_are_named(lay_out: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lay_out()
