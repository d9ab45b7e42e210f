"""The one module that moves matrices by collectives: buffers laid out, all-to-alls started.

It knows nothing of what is computed. `amo_dist.engine.step` takes each bucket through it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from amo_dist.distributed.ownership import Job
from amo_dist.distributed.plan import Bucket, ExchangePlan, Part, PartsByPeer, count_elements

BUCKETS_IN_FLIGHT = 2
"""Gathers under way at once. A third bucket's gather begins when the first is computed, and its
results leave when those of the first have arrived: so each buffer serves every second bucket."""

_ALIGNMENT = 64
"""Elements. Each whole matrix starts at a multiple of this, aligned like a tensor of its own: the
bits of a product may depend on that."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Side:
    """What this rank sends, or receives, in one all-to-all.

    Attributes:
        parts: In the order in which they travel.
        views: Of each part in ``memory``, in the shape that it has in the local tensor.
        memory: Bytes of all parts.
        sizes: Bytes by peer.
    """

    parts: tuple[Part, ...]
    views: list[Tensor]
    memory: Tensor
    sizes: list[int]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """A bucket laid out in memory, to be used step after step.

    Attributes:
        jobs: What this rank computes.
        wholes: The box of the matrix of each job, ``(m, n)``; the next lane gets the same memory.
        kept: Parts of these boxes that this rank holds itself.
        kept_views: Of each in ``wholes``, in the shape that it has in the local tensor.
        sent: Momentum on its way to owners.
        arriving: Momentum on its way here.
        arrivals: Where each part of ``arriving`` goes in ``wholes``.
        leaving: Results on their way from here.
        departures: Where each part of ``leaving`` comes from in ``wholes``.
        returned: Results on their way back.
        moves: Whether anything travels.
    """

    jobs: tuple[Job, ...]
    wholes: list[Tensor]
    kept: tuple[Part, ...]
    kept_views: list[Tensor]
    sent: Side
    arriving: Side
    arrivals: list[Tensor]
    leaving: Side
    departures: list[Tensor]
    returned: Side
    moves: bool


class Exchange:
    """The buffers of one `ExchangePlan` on one rank, and what moves them.

    The plan fixes the order of collectives, the same on all peers. Shared buffers are safe on CUDA
    too, where collectives run on a stream of their own: each starts behind the work that the
    current stream already has, and ``wait`` holds back what the current stream gets next, not the
    host.

    Args:
        plan: Of this rank.
        group: Process group of the plan's peers; None on a single rank.
        device: Where the local tensors live.
        dtype: In which matrices travel.
    """

    def __init__(
        self,
        plan: ExchangePlan,
        *,
        group: dist.ProcessGroup | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.plan = plan
        self.lanes: list[Lane] = []
        """Local buckets first; empty until `allocate`."""
        sent = plan.sent_elements()
        self.sent = {(peer, dtype.itemsize): number for peer, number in sent.items()}
        """Elements that a step sends, by peer and bytes of one."""
        self._group, self._device, self._dtype = group, device, dtype

    def allocate(self) -> None:
        """Allocate the buffers anew; communicates nothing.

        After a step that failed this comes first: what is still under way must not arrive in the
        buffers of a later step.
        """
        self.lanes = []
        plan = self.plan
        buckets = [*plan.local, *plan.buckets]
        sides = [
            self._sides([getattr(bucket, name) for bucket in buckets], whole=whole)
            for name, whole in (
                *(("to_owners", False), ("from_holders", True)),
                *(("to_holders", True), ("from_owners", False)),
            )
        ]
        most = max((sum(_spaces(bucket.jobs)) for bucket in buckets), default=0)
        memory = torch.empty(most, dtype=self._dtype, device=self._device)
        found = enumerate(zip(buckets, *sides, strict=True))
        self.lanes = [
            _lane(bucket, memory, *four, moves=index >= len(plan.local))
            for index, (bucket, *four) in found
        ]

    def start(self, send: Side, receive: Side) -> Any:
        """Start a ragged all-to-all, without padding; its ``wait()`` makes the results usable.

        Bytes travel, so that every backend takes every dtype.
        """
        return dist.all_to_all_single(
            receive.memory,
            send.memory,
            receive.sizes,
            send.sizes,
            group=self._group,
            async_op=True,
        )

    def _sides(self, transfers: Sequence[PartsByPeer], *, whole: bool) -> list[Side]:
        """One side of the transfers of all buckets, which take turns in two buffers.

        Args:
            transfers: Of each bucket.
            whole: Give views the shape of the part in its matrix, not in the local tensor.
        """
        itemsize = self._dtype.itemsize
        sizes = [[itemsize * count_elements(parts) for parts in transfer] for transfer in transfers]
        totals = list(map(sum, sizes))
        memory = [
            torch.empty(
                max(totals[turn::BUCKETS_IN_FLIGHT], default=0),
                dtype=torch.uint8,
                device=self._device,
            )
            for turn in range(BUCKETS_IN_FLIGHT)
        ]
        sides = []
        for index, transfer in enumerate(transfers):
            own = memory[index % BUCKETS_IN_FLIGHT][: totals[index]]
            parts = tuple(itertools.chain(*transfer))
            shapes = [part.piece.source_shape for part in parts]
            flat = own.view(self._dtype).split([math.prod(shape) for shape in shapes])
            pairs = zip(flat, shapes, strict=True)
            views = [each.view(shape[-2:] if whole else shape) for each, shape in pairs]
            sides.append(Side(parts, views, own, sizes[index]))
        return sides


def _lane(
    bucket: Bucket,
    memory: Tensor,
    sent: Side,
    arriving: Side,
    leaving: Side,
    returned: Side,
    *,
    moves: bool,
) -> Lane:
    starts = itertools.accumulate(_spaces(bucket.jobs), initial=0)
    wholes = [
        memory[start : start + math.prod(shape)].view(shape)
        for shape, start in zip((job.shape for job in bucket.jobs), starts, strict=False)
    ]
    places = {job.matrix: (each, job) for each, job in zip(wholes, bucket.jobs, strict=True)}
    kept = [_within(places, part).view(part.piece.source_shape) for part in bucket.kept]
    arrivals = [_within(places, part) for part in arriving.parts]
    departures = [_within(places, part) for part in leaving.parts]
    return Lane(
        bucket.jobs,
        wholes,
        bucket.kept,
        kept,
        sent,
        arriving,
        arrivals,
        leaving,
        departures,
        returned,
        moves,
    )


def _within(places: dict[int, tuple[Tensor, Job]], part: Part) -> Tensor:
    """The view of a part in the box of its matrix."""
    whole, job = places[part.matrix]
    (top, bottom), (left, right) = part.piece.target
    (row, _), (column, _) = job.box
    return whole[top - row : bottom - row, left - column : right - column]


def _spaces(jobs: Sequence[Job]) -> list[int]:
    """Elements that the box of each job takes in memory, padded."""
    return [-(-math.prod(job.shape) // _ALIGNMENT) * _ALIGNMENT for job in jobs]
