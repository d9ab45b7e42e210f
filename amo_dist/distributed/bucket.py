"""Buckets: matrices that travel together, their buffers, and the collectives that move them.

This is the one module that moves matrices. It knows nothing of what is computed with them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from amo_dist.distributed.layout import Matrix, Region, as_matrix
from amo_dist.distributed.plan import BucketPlan, ExchangePlan, count_elements

BUCKETS_IN_FLIGHT = 2
"""Buckets whose buffers are in use at once: bucket k takes those of bucket k - 2."""

_ALIGNMENT = 64
"""Elements. Each whole matrix starts at a multiple of this, aligned like a tensor of its own: the
bits of a product may depend on that."""

Piece = TypeVar("Piece")
"""The caller's own type of a region on this rank, bound to its place in a buffer."""


class _Packed(NamedTuple):
    """Regions side by side in memory, as one rank sends or receives them."""

    memory: Tensor
    """Bytes of all regions, 1-D."""
    sizes: list[int]
    """Bytes by peer."""
    views: list[Tensor]
    """View of each region, ``(m, n)``."""


class Bucket(Generic[Piece]):
    """Matrices that travel together, on one rank; its buffers serve step after step.

    A step fills the places of ``sent`` and calls `start_gather`; later it fills those of ``kept``
    and calls `finish_gather`. It then computes ``wholes`` in place, and calls `start_scatter`. The
    places of ``kept`` now hold results; after `finish_scatter` those of ``returned`` do, too.

    Collectives start behind the work that the current stream already has, and waiting for one holds
    back later work of that stream, not the host: so shared buffers are safe on CUDA, too. After an
    exception, safety rests on NCCL, which keeps the buffers of running collectives alive.

    Attributes:
        jobs: Jobs of this rank.
        wholes: Matrix of each job, ``(m, n)``; buckets share this memory.
        kept: Pieces of ``wholes`` that this rank holds itself.
        sent: Pieces whose momentum this rank sends to owners.
        returned: Pieces whose results this rank receives.
        moves: Whether anything travels.
        batches: Positions in ``jobs`` of matrices to compute together; the caller's own.
    """

    def __init__(
        self,
        plan: BucketPlan,
        shapes: Sequence[tuple[int, int]],
        memory: Tensor,
        buffers: Sequence[_Packed],
        make_piece: Callable[[int, Region, Tensor], Piece],
        group: dist.ProcessGroup | None,
        *,
        moves: bool,
    ) -> None:
        self.jobs, self.moves, self._group = plan.jobs, moves, group
        self.batches: dict[Any, list[int]] = {}
        starts = itertools.accumulate(map(_space, shapes), initial=0)
        self.wholes = [
            memory[start : start + math.prod(shape)].view(shape)
            for shape, start in zip(shapes, starts, strict=False)
        ]
        whole_of = {job.matrix: x for job, x in zip(plan.jobs, self.wholes, strict=True)}

        def in_whole(matrix: int, region: Region) -> Tensor:
            """The view of a region in its matrix."""
            (top, bottom), (left, right) = region.target
            return whole_of[matrix][top:bottom, left:right]

        self._momentum_out, self._momentum_in, self._results_out, self._results_in = buffers
        self.kept = [make_piece(*held, in_whole(*held)) for held in plan.kept]
        self.sent = [
            make_piece(*held, view)
            for held, view in zip(_flat(plan.to_owners), self._momentum_out.views, strict=True)
        ]
        self.returned = [
            make_piece(*held, view)
            for held, view in zip(_flat(plan.from_owners), self._results_in.views, strict=True)
        ]
        self._arrivals = [in_whole(*held) for held in _flat(plan.from_holders)]
        self._departures = [in_whole(*held) for held in _flat(plan.to_holders)]
        self._work: Any = None

    def start_gather(self) -> None:
        """Start to send the momentum in ``sent`` to its owners."""
        if self.moves:
            self._work = self._exchange(self._momentum_out, self._momentum_in)

    def finish_gather(self) -> None:
        """Wait for the momentum of this rank's jobs, and put it into ``wholes``."""
        if self.moves:
            self._work.wait()
            if self._arrivals:
                torch._foreach_copy_(self._arrivals, self._momentum_in.views)

    def start_scatter(self) -> None:
        """Start to send results from ``wholes`` back to the ranks that hold their pieces."""
        if self.moves:
            if self._departures:
                torch._foreach_copy_(self._results_out.views, self._departures)
            self._work = self._exchange(self._results_out, self._results_in)

    def finish_scatter(self) -> None:
        """Wait for the results in ``returned``."""
        if self.moves:
            self._work.wait()
            self._work = None

    def _exchange(self, send: _Packed, receive: _Packed) -> Any:
        """Start a ragged all-to-all without padding; bytes, so that every backend takes it."""
        return dist.all_to_all_single(
            receive.memory,
            send.memory,
            receive.sizes,
            send.sizes,
            group=self._group,
            async_op=True,
        )


def make_buckets(
    plan: ExchangePlan,
    matrices: Sequence[Matrix],
    make_piece: Callable[[int, Region, Tensor], Piece],
    *,
    group: dist.ProcessGroup | None,
    device: torch.device,
    dtype: torch.dtype,
) -> list[Bucket[Piece]]:
    """Allocate the buffers of a plan, and lay its buckets out in them; communicates nothing.

    After a step that failed this is done anew: what is still under way must not arrive in the
    buffers of a later step.

    Args:
        plan: Plan of this rank; it fixes the order of collectives, the same on all peers.
        matrices: All matrices; jobs index them.
        make_piece: Called with the index of a matrix, a region, and its place ``(m, n)``.
        group: Process group of the plan's peers; None on a single rank.
        device: Device of the buffers.
        dtype: Dtype in which matrices travel.

    Returns:
        Local buckets first, then those that travel.
    """
    plans = [*plan.local, *plan.buckets]
    fields = ("to_owners", "from_holders", "to_holders", "from_owners")
    sides = [_pack([getattr(p, field) for p in plans], dtype, device) for field in fields]
    shapes = [[matrices[job.matrix].shape for job in p.jobs] for p in plans]
    size = max((sum(map(_space, part)) for part in shapes), default=0)
    memory = torch.empty(size, dtype=dtype, device=device)
    return [
        Bucket(p, part, memory, buffers, make_piece, group, moves=number >= len(plan.local))
        for number, (p, part, *buffers) in enumerate(zip(plans, shapes, *sides, strict=True))
    ]


def _pack(
    transfers: Sequence[Sequence[Sequence[tuple[int, Region]]]],
    dtype: torch.dtype,
    device: torch.device,
) -> list[_Packed]:
    """One side of the transfers of all buckets, which take turns in two buffers."""
    sizes = [[dtype.itemsize * count_elements(held) for held in by_peer] for by_peer in transfers]
    totals = list(map(sum, sizes))
    slots = [
        torch.empty(
            max(totals[first::BUCKETS_IN_FLIGHT], default=0), dtype=torch.uint8, device=device
        )
        for first in range(BUCKETS_IN_FLIGHT)
    ]
    packed = []
    for index, by_peer in enumerate(transfers):
        memory = slots[index % BUCKETS_IN_FLIGHT][: totals[index]]
        shapes = [region.source_shape for _, region in _flat(by_peer)]
        flat = memory.view(dtype).split([math.prod(shape) for shape in shapes])
        views = [as_matrix(part.view(shape)) for part, shape in zip(flat, shapes, strict=True)]
        packed.append(_Packed(memory, sizes[index], views))
    return packed


def _flat(by_peer: Sequence[Sequence[tuple[int, Region]]]) -> Iterator[tuple[int, Region]]:
    return itertools.chain.from_iterable(by_peer)


def _space(shape: tuple[int, int]) -> int:
    """Elements that a matrix takes in memory, padded."""
    return -(-math.prod(shape) // _ALIGNMENT) * _ALIGNMENT
