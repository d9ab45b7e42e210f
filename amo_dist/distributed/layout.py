"""Regions of matrices by the rank that holds them.

Everything here is a pure function of shapes, meshes and placements: no communication, and no
process group is needed, so that a layout on a thousand ranks can be built on a laptop.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from amo_dist.compat import StridedShard, local_of
from amo_dist.config import Box, require

# Half-open ``(start, stop)``.
Interval = tuple[int, int]
Placements = tuple[Any, ...]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TensorLayout:
    """Placement of the elements of one tensor over ranks; compared and hashed by identity.

    Attributes:
        shape: Global shape.
        ranks: Global ranks of the mesh, in the mesh's order.
        intervals_by_rank: For each rank and dim, the global intervals whose concatenation is
            that dim of the rank's local tensor.
        replicas: Groups of ranks; the ranks of each group together hold each element once.
        key: Text that tells this layout from any other, for comparison among ranks.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    intervals_by_rank: Mapping[int, tuple[tuple[Interval, ...], ...]]
    replicas: tuple[tuple[int, ...], ...]
    key: str

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the local tensor of ``rank``."""
        return tuple(
            sum(stop - start for start, stop in intervals)
            for intervals in self.intervals_by_rank[rank]
        )


@dataclasses.dataclass(frozen=True)
class Region:
    """A box of a rank's local tensor, and the box of the matrix that it holds.

    Attributes:
        source: Box in the local tensor; see `flattened` for convolutions.
        target: Box ``(rows, columns)`` in the matrix.
    """

    source: Box
    target: Box

    @functools.cached_property
    def source_shape(self) -> tuple[int, ...]:
        """Shape of the box in the local tensor."""
        return tuple(stop - start for start, stop in self.source)

    @functools.cached_property
    def num_elements(self) -> int:
        """Elements in the box."""
        return math.prod(self.source_shape)


@dataclasses.dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix to orthogonalize, and the regions of it that each rank holds.

    Attributes:
        name: Name, unique in the world.
        param: Index of the parameter, among those of the caller, that holds the matrix.
        shape: Shape ``(m, n)`` of the whole matrix.
        dim: Dim along which the boxes of its view are joined; for weights, that of the outputs.
        ranks: Global ranks of the mesh, in the mesh's order.
        regions_by_rank: Regions by rank; ranks that hold nothing of the matrix are absent.
        replicas: Groups of ranks, as in `TensorLayout`.
        empty_by_rank: Regions without elements on ranks that hold nothing of the matrix, but rows
            of it (for `dim` 1, columns) if these had any length: a state by row lies there, too.
    """

    name: str
    param: int
    shape: tuple[int, int]
    dim: int
    ranks: tuple[int, ...]
    regions_by_rank: Mapping[int, tuple[Region, ...]]
    replicas: tuple[tuple[int, ...], ...]
    empty_by_rank: Mapping[int, tuple[Region, ...]]

    @property
    def num_elements(self) -> int:
        """Elements of the whole matrix."""
        return self.shape[0] * self.shape[1]

    def num_held(self, rank: int) -> int:
        """Elements of the matrix that ``rank`` holds."""
        return sum(region.num_elements for region in self.regions_by_rank.get(rank, ()))


def _chunk(intervals: Sequence[Interval], num_chunks: int, index: int) -> tuple[Interval, ...]:
    """Chunk ``index`` of the concatenation of ``intervals``, in the way of `torch.chunk`.

    Chunks have equal sizes, save for the last ones, which are short or empty.
    """
    size = -(-sum(high - low for low, high in intervals) // num_chunks)
    start, stop = index * size, (index + 1) * size
    parts: list[Interval] = []
    for low, high in intervals:
        parts.append((low + max(start, 0), min(low + stop, high)))
        start, stop = start - (high - low), stop - (high - low)
    return tuple((low, high) for low, high in parts if low < high)


def _strided_chunk(
    intervals: Sequence[Interval], split_factor: int, num_chunks: int, index: int
) -> tuple[Interval, ...]:
    """Chunk ``index`` of each of ``split_factor`` chunks; what ``Shard`` keeps with factor 1."""
    outer = (_chunk(intervals, split_factor, part) for part in range(split_factor))
    return tuple(itertools.chain(*(_chunk(part, num_chunks, index) for part in outer)))


def _application_order(mesh_shape: Sequence[int], placements: Placements) -> list[tuple[int, int]]:
    """Mesh axes in the order in which they cut the tensor, each with its split factor.

    FSDP over tensor parallelism writes ``[_StridedShard(d, split_factor=tp), Shard(d)]``: tensor
    parallelism cuts first although its axis stands to the right. Cutting in the true order keeps
    each local tensor contiguous, uneven sizes included.
    """
    order: list[tuple[int, int]] = []
    deferred: list[tuple[int, int]] = []
    for axis, placement in enumerate(placements):
        if isinstance(placement, StridedShard):
            to_the_right = zip(mesh_shape[axis + 1 :], placements[axis + 1 :], strict=True)
            cuts = [size for size, other in to_the_right if other == Shard(placement.dim)]
            if cuts and math.prod(cuts) == placement.split_factor:
                deferred.append((axis, 1))
            else:
                order.append((axis, int(placement.split_factor)))
        elif isinstance(placement, Shard):
            order.append((axis, 1))
        else:
            is_replica = isinstance(placement, Replicate)
            require(is_replica, "placements", placement, "Shard, _StridedShard or Replicate")
    return order + deferred[::-1]


@functools.lru_cache(maxsize=4096)
def _mesh_layout(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    mesh_ranks: tuple[int, ...],
    placements: Placements,
) -> TensorLayout:
    whole = tuple(((0, size),) for size in shape)
    order = _application_order(mesh_shape, placements)
    intervals_by_rank: dict[int, tuple[tuple[Interval, ...], ...]] = {}
    replicas: dict[tuple[int, ...], list[int]] = {}
    coordinates = itertools.product(*map(range, mesh_shape))
    for rank, coordinate in zip(mesh_ranks, coordinates, strict=True):
        intervals: list[tuple[Interval, ...]] = list(whole)
        for axis, factor in order:
            dim = placements[axis].dim
            num_chunks, index = mesh_shape[axis], coordinate[axis]
            intervals[dim] = _strided_chunk(intervals[dim], factor, num_chunks, index)
        intervals_by_rank[rank] = tuple(intervals)
        replica = tuple(
            index
            for index, placement in zip(coordinate, placements, strict=True)
            if isinstance(placement, Replicate)
        )
        replicas.setdefault(replica, []).append(rank)
    key = f"{shape} over {mesh_shape} {_compact(mesh_ranks)} as {placements}"
    return TensorLayout(
        shape=shape,
        ranks=mesh_ranks,
        intervals_by_rank=intervals_by_rank,
        replicas=tuple(map(tuple, replicas.values())),
        key=key,
    )


def _compact(ranks: tuple[int, ...]) -> str:
    consecutive = ranks == tuple(range(ranks[0], ranks[0] + len(ranks)))
    return f"ranks {ranks[0]}..{ranks[-1]}" if consecutive else f"ranks {ranks}"


def mesh_layout(
    shape: Sequence[int], mesh: torch.Tensor, placements: Sequence[Any]
) -> TensorLayout:
    """Layout of a tensor of global ``shape``, placed as a DTensor on ``mesh``.

    Args:
        shape: Global shape.
        mesh: Integer tensor of global ranks, one dim for each mesh axis.
        placements: One ``Shard``, ``_StridedShard`` or ``Replicate`` for each mesh axis.

    Raises:
        ValueError: A placement is of another kind.
    """
    ranks = tuple(mesh.flatten().tolist())
    return _mesh_layout(tuple(shape), tuple(mesh.shape), ranks, tuple(placements))


def replicated_layout(shape: Sequence[int], ranks: Sequence[int]) -> TensorLayout:
    """Layout of a plain tensor that each of ``ranks`` holds whole, as under DDP."""
    return _mesh_layout(tuple(shape), (len(ranks),), tuple(ranks), (Replicate(),))


def layout_of(tensor: torch.Tensor, name: str, ranks: Sequence[int]) -> TensorLayout:
    """Layout of a parameter.

    Args:
        tensor: A DTensor, laid out by its mesh and placements, or a plain tensor.
        name: For errors.
        ranks: Global ranks that hold a plain tensor as replicas; this rank alone, if private.

    Raises:
        ValueError: A placement is neither a shard nor a replica, or the local tensor has another
            shape than the placements say.
    """
    if not isinstance(tensor, DTensor):
        return replicated_layout(tensor.shape, ranks)
    mesh = tensor.device_mesh
    try:
        layout = mesh_layout(tensor.shape, mesh.mesh, tensor.placements)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    rank, ranks = mesh.get_rank(), layout.ranks
    require(rank in ranks, name, f"rank {rank}", f"one of its mesh's ranks, {ranks}")
    local_shape, expected = tuple(tensor.to_local().shape), layout.local_shape(rank)
    is_equal = local_shape == expected or math.prod(local_shape) + math.prod(expected) == 0
    require(is_equal, name, f"a local tensor of shape {local_shape}", f"{expected}: {layout.key}")
    return layout


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, or the tensor itself; shares memory, needs no gradient."""
    if not isinstance(tensor, DTensor):
        return tensor.detach() if tensor.requires_grad else tensor
    local: torch.Tensor = local_of(tensor)
    return local


def _overlaps(
    extent: Interval, intervals: Sequence[Interval]
) -> Iterator[tuple[Interval, Interval]]:
    """Overlaps of an extent with intervals: positions in their concatenation, and in the extent."""
    offset = 0
    for low, high in intervals:
        start, stop = max(extent[0], low), min(extent[1], high)
        if start < stop:
            shift = offset - low
            yield (start + shift, stop + shift), (start - extent[0], stop - extent[0])
        offset += high - low


def _box_regions(
    box: Box, origin: tuple[int, int], local: tuple[tuple[Interval, ...], ...]
) -> Iterator[Region]:
    """Regions of one box of a view, which starts at ``origin`` in the matrix, on one rank.

    A dim of which the rank holds nothing has one overlap, without length.
    """
    row, column = origin
    choices = (
        tuple(_overlaps(extent, intervals)) if intervals else (((0, 0), (0, 0)),)
        for extent, intervals in zip(box, local, strict=True)
    )
    for combination in itertools.product(*choices):
        (top, bottom), (left, right) = (target for _, target in combination[-2:])
        yield Region(
            source=tuple(source for source, _ in combination),
            target=((top + row, bottom + row), (left + column, right + column)),
        )


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor ``(m, a, ...)`` of a convolution as ``(m, a * ...)``; one of two dims as it is.

    Shares memory.

    Raises:
        RuntimeError: The memory has another order, as under ``channels_last``.
    """
    if tensor.dim() < 3:
        return tensor
    return tensor.view(tensor.shape[0], math.prod(tensor.shape[1:]))


@functools.lru_cache(maxsize=4096)
def flattened_layout(layout: TensorLayout) -> TensorLayout:
    """Layout of the local tensors that `flattened` returns.

    Raises:
        ValueError: The tensor is sharded along a dim after its second.
    """
    rows, columns, *inner = layout.shape
    size = math.prod(inner)
    intervals_by_rank: dict[int, tuple[tuple[Interval, ...], ...]] = {}
    for rank, (outer, along, *last) in layout.intervals_by_rank.items():
        is_whole = all(cuts == ((0, length),) for cuts, length in zip(last, inner, strict=True))
        require(is_whole, "layout", layout.key, "no shards but along the first two dims")
        wide = tuple((low * size, high * size) for low, high in along)
        intervals_by_rank[rank] = (outer, wide)
    return dataclasses.replace(
        layout, shape=(rows, columns * size), intervals_by_rank=intervals_by_rank
    )


@functools.lru_cache(maxsize=4096)
def _ranks_by_first_cut(layout: TensorLayout) -> Mapping[tuple[Interval, ...], Sequence[int]]:
    """Ranks by their intervals of the first dim: few of many ranks hold any of one expert."""
    ranks: dict[tuple[Interval, ...], list[int]] = defaultdict(list)
    for rank, (intervals, *_) in layout.intervals_by_rank.items():
        ranks[intervals].append(rank)
    return ranks


@functools.lru_cache(maxsize=4096)
def _view(
    layout: TensorLayout, boxes: tuple[Box, ...], dim: int
) -> tuple[tuple[int, int], Mapping[int, tuple[Region, ...]], Mapping[int, tuple[Region, ...]]]:
    """Shape of a view's matrix, and its regions by rank, those without elements apart.

    Matrices of one layout share them. See `Matrix` for the regions without elements that count.
    """
    regions: dict[int, list[Region]] = defaultdict(list)
    empty: dict[int, list[Region]] = defaultdict(list)
    origin = [0, 0]
    for box in boxes:
        (top, bottom), (left, right) = box[-2:]
        shape = [bottom - top, right - left]
        for intervals, ranks in _ranks_by_first_cut(layout).items():
            # Ranks without any part of the first dim may have regions without elements.
            if intervals and not any(_overlaps(box[0], intervals)):
                continue
            for rank in ranks:
                local = layout.intervals_by_rank[rank]
                for region in _box_regions(box, (origin[0], origin[1]), local):
                    *others, rows, columns = region.source_shape
                    if region.num_elements:
                        regions[rank].append(region)
                    elif all((*others, (rows, columns)[dim])):
                        empty[rank].append(region)
        origin[dim] += shape[dim]
    shape[dim] = origin[dim]
    by_rank = [{rank: tuple(own) for rank, own in held.items()} for held in (regions, empty)]
    return (shape[0], shape[1]), by_rank[0], by_rank[1]


def make_matrix(
    name: str,
    layout: TensorLayout,
    param: int,
    boxes: Sequence[Box] | None = None,
    dim: int = 0,
) -> Matrix:
    """Make the matrix that a view cuts out of a parameter.

    Args:
        name: Name of the matrix.
        layout: Layout of the parameter, which has at least two dims.
        param: Index of the parameter, for `Matrix.param`.
        boxes: Boxes in the parameter's coordinates; leading dims have one element. ``None`` means
            all of a parameter of two dims, or of a convolution, whose first dim is the rows.
        dim: Dim of the matrix, 0 or 1, along which the boxes are joined.

    Raises:
        ValueError: A convolution is sharded along a dim after its second.
    """
    if boxes is None:
        if len(layout.shape) > 2:
            layout = flattened_layout(layout)
        boxes = (tuple((0, size) for size in layout.shape),)
    shape, regions, empty = _view(layout, tuple(boxes), dim)
    return Matrix(
        name=name,
        param=param,
        shape=shape,
        dim=dim,
        ranks=layout.ranks,
        regions_by_rank=regions,
        replicas=layout.replicas,
        empty_by_rank=empty,
    )


def cut_like(value: torch.Tensor, box: Box, shape: torch.Size) -> torch.Tensor:
    """The box of a tensor in this shape, as a matrix; a dim in which it has size 1 is kept whole.

    Shares memory. Leading dims of the box have one element.
    """
    edges = zip(box, value.shape, shape, strict=True)
    slices = tuple(slice(*edge) if size == whole else slice(1) for edge, size, whole in edges)
    part = value[slices]
    return part if part.dim() == 2 else part.view(part.shape[-2:])
