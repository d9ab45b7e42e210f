"""Sharded matrices in, a function from whole matrices to whole matrices, sharded results out.

The one module that moves matrices by collectives. It knows nothing of what is computed.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from amo_dist.distributed.plan import (
    ExchangePlan,
    Part,
    PartsByPeer,
    Task,
    Transfer,
    count_elements,
)
from amo_dist.distributed.spans import span

_ALIGNMENT = 64
"""Elements. Each whole matrix starts at a multiple of this, aligned like a tensor of its own: the
bits of a product may depend on that."""

Read = Callable[[Sequence[Part], Sequence[Tensor]], None]
"""Fills each place with the values of its part of this rank's local tensors. A place has the shape
that the part has there, and the dtype of the wire."""
Compute = Callable[[Task, Sequence[Tensor]], Sequence[Tensor]]
"""Takes the matrices of a task, ``(m, n)`` each, or this rank's boxes of them, in the dtype of the
wire, and returns a result for each. The matrices are lent: the next task gets the same memory.
Results may be lent in the same way, until the next call."""
Write = Callable[[Sequence[Part], Sequence[Tensor]], None]
"""Takes the results for parts of this rank's local tensors, each in the shape that the part has
there. They are lent: copy what must outlive the call."""


class Exchange:
    """Runs one `ExchangePlan` on one rank, step after step, over buffers that stay.

    The plan fixes the order of collectives, the same on all peers. Buckets that are never under
    way together share buffers. This is safe on CUDA too, where collectives run on a stream of
    their own: each starts behind the work that the current stream already has, and `wait` holds
    back what the current stream gets next, not the host.

    Args:
        plan: Of this rank.
        group: Process group of the plan's peers; None on a single rank.
        device: Where the local tensors live.
        wire_dtype: In which matrices travel.
        wide_dtype: In which matrices travel to their owner in wide buckets.
        buckets_in_flight: How many gathers may be under way at once.
    """

    def __init__(
        self,
        plan: ExchangePlan,
        *,
        group: dist.ProcessGroup | None,
        device: torch.device,
        wire_dtype: torch.dtype,
        wide_dtype: torch.dtype,
        buckets_in_flight: int,
    ) -> None:
        self.plan = plan
        self.sent_bytes: Counter[int] = Counter()
        """Bytes sent to each peer in the last `run`."""
        self.sent_elements: Counter[int] = Counter()
        """Elements sent to each peer in the last `run`."""
        self._group = group
        self._device = device
        self._wire_dtype = wire_dtype
        self._wide_dtype = wide_dtype
        self._buckets_in_flight = buckets_in_flight
        self._routes: list[_Route] = []

    def allocate(self) -> None:
        """Allocate the buffers where they are not there yet; communicates nothing."""
        self._routes = self._routes or self._lay_out()

    def run(
        self,
        read: Read,
        compute: Compute,
        write: Write,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Gather, compute, deliver and write back every matrix once; a collective over the peers.

        A run after one that failed allocates the buffers anew.

        Args:
            read: Called for parts that are sent, and for those of matrices owned here.
            compute: Called for each task.
            write: Called for parts whose results are there.
            meanwhile: Work that needs no exchange; done while the first buckets travel.
        """
        self.sent_bytes.clear()
        self.sent_elements.clear()
        # Put back only at the end: after an error, what is still under way must not arrive in the
        # buffers of a later step.
        self.allocate()
        routes, self._routes = self._routes, []
        local, moving = routes[: len(self.plan.local)], routes[len(self.plan.local) :]
        ahead = self._buckets_in_flight
        for route in moving[:ahead]:
            self._start_gather(route, read)
        if meanwhile is not None:
            meanwhile()
        for route in local:
            route.compute(read, compute, write)
        for index in range(len(moving) + 2):
            if index < len(moving):
                route = moving[index]
                with span("amo::gather"):
                    route.work.wait()
                route.compute(read, compute, write)
                with span("amo::scatter"):
                    route.work = self._start(route.deliver_send, route.deliver_receive)
            if index + ahead < len(moving):
                self._start_gather(moving[index + ahead], read)
            # What was forwarded comes first: the next to be forwarded takes its buffers.
            if index > 1:
                moving[index - 2].finish(write)
            if 0 < index <= len(moving):
                self._finish_delivery(moving[index - 1], write)
        self._routes = routes

    def _start_gather(self, route: _Route, read: Read) -> None:
        with span("amo::gather"):
            send = route.gather_send
            if send.parts:
                read(send.parts, send.views)
            route.work = self._start(send, route.gather_receive)

    def _finish_delivery(self, route: _Route, write: Write) -> None:
        """Wait for results, forward those that others here wait for, and write them."""
        with span("amo::scatter"):
            route.work.wait()
            if route.forwards:
                if route.forwarded:
                    torch._foreach_copy_(route.forward_send.views, route.forwarded)
                route.work = self._start(route.forward_send, route.forward_receive)
        side = route.deliver_receive
        if side.parts:
            write(side.parts, side.views)

    def _start(self, send: _Side, receive: _Side) -> Any:
        """Start a ragged all-to-all, without padding.

        Bytes travel, so that every backend takes every dtype.
        """
        for peer, size in zip(self.plan.peers, send.sizes, strict=True):
            if size:
                self.sent_bytes[peer] += size
                self.sent_elements[peer] += size // send.itemsize
        return dist.all_to_all_single(
            receive.memory,
            send.memory,
            receive.sizes,
            send.sizes,
            group=self._group,
            async_op=True,
        )

    def _lay_out(self) -> list[_Route]:
        """Allocate all buffers, and find what lies where in them; local buckets come first."""
        buckets = (*self.plan.local, *self.plan.buckets)
        dtypes = [self._wide_dtype if bucket.wide else self._wire_dtype for bucket in buckets]
        wire, ahead = [self._wire_dtype] * len(buckets), self._buckets_in_flight
        forwards = [bucket.forward or Transfer((), ()) for bucket in buckets]
        routes = list(
            map(
                _Route,
                self._sides([bucket.gather.send for bucket in buckets], dtypes, ahead),
                self._sides([bucket.gather.receive for bucket in buckets], dtypes, ahead, True),
                # Two slots: one delivery still lands while the next is packed.
                self._sides([bucket.deliver.send for bucket in buckets], wire, 2, True),
                self._sides([bucket.deliver.receive for bucket in buckets], wire, 2),
                # One: what was forwarded is there before the next is packed.
                self._sides([transfer.send for transfer in forwards], wire, 1),
                self._sides([transfer.receive for transfer in forwards], wire, 1),
                [bucket.forward is not None for bucket in buckets],
            )
        )
        of_bucket = list(zip(buckets, dtypes, routes, strict=True))
        memory = self._allocate(
            [sum(_spaces(t)) * dtype.itemsize for b, dtype, _ in of_bucket for t in b.tasks]
        )
        for bucket, dtype, route in of_bucket:
            for task in bucket.tasks:
                route.add(task, _whole(task, memory.view(dtype)))
        return routes

    def _sides(
        self,
        sides: Sequence[PartsByPeer],
        dtypes: Sequence[torch.dtype],
        num_slots: int,
        whole: bool = False,
    ) -> list[_Side]:
        """One side of the transfers of all buckets, which take turns in ``num_slots`` buffers."""
        pairs = list(zip(sides, dtypes, strict=True))
        sizes = [dtype.itemsize * sum(map(count_elements, side)) for side, dtype in pairs]
        slots = [self._allocate(sizes[slot::num_slots]) for slot in range(num_slots)]
        return [
            _Side(side, dtype, slots[index % num_slots][: sizes[index]], whole=whole)
            for index, (side, dtype) in enumerate(pairs)
        ]

    def _allocate(self, sizes: Sequence[int]) -> Tensor:
        """A flat buffer of bytes, as large as the largest of its uses."""
        return torch.empty(max(sizes, default=0), dtype=torch.uint8, device=self._device)


def _spaces(task: Task) -> list[int]:
    """Elements that each box of a task takes in the buffer of what is computed, padded."""
    return [-(-math.prod(shape) // _ALIGNMENT) * _ALIGNMENT for shape in task.shapes]


def _whole(task: Task, buffer: Tensor) -> list[Tensor]:
    """Views for the boxes of a task, one after the other in a flat buffer."""
    starts = itertools.accumulate(_spaces(task), initial=0)
    return [
        buffer[start : start + math.prod(shape)].view(shape)
        for shape, start in zip(task.shapes, starts, strict=False)
    ]


class _Side:
    """What this rank sends, or receives, in one all-to-all: parts in a flat buffer, by peer.

    Args:
        parts_by_peer: For each peer, in order.
        dtype: In which they travel.
        memory: The bytes of these parts, and no more.
        whole: Give views the shape of the part in its matrix, not in the local tensor.
    """

    def __init__(
        self, parts_by_peer: PartsByPeer, dtype: torch.dtype, memory: Tensor, *, whole: bool
    ) -> None:
        self.memory, self.itemsize = memory, dtype.itemsize
        self.sizes = [dtype.itemsize * count_elements(parts) for parts in parts_by_peer]
        self.parts = tuple(itertools.chain(*parts_by_peer))
        shapes = [part.piece.source_shape for part in self.parts]
        flat = memory.view(dtype).split([math.prod(shape) for shape in shapes])
        self.views = [
            each.view(shape[-2:] if whole else shape)
            for each, shape in zip(flat, shapes, strict=True)
        ]

    def of(self, task: Task) -> tuple[list[Part], list[Tensor]]:
        """The parts of the matrices of a task, and their views."""
        owned, found = {*task.owned}, zip(self.parts, self.views, strict=True)
        pairs = [(part, view) for part, view in found if part.matrix in owned]
        return [part for part, _ in pairs], [view for _, view in pairs]


class _TaskRun:
    """A task, and where its matrices and their parts lie.

    Args:
        task: Of the plan.
        matrices: Where to put its boxes of matrices, ``(m, n)`` each.
        arriving: Parts of all matrices of the bucket, on their way here.
        leaving: Parts of all results of the bucket, on their way from here.
    """

    def __init__(
        self, task: Task, matrices: Sequence[Tensor], arriving: _Side, leaving: _Side
    ) -> None:
        self._task = task
        self._matrices = matrices
        self._kept = _as_local(task, matrices, task.kept)
        parts, self._arrived = arriving.of(task)
        self._places = _in_boxes(task, matrices, parts)
        self._leaving, self._packed = leaving.of(task)
        self._known: object = None
        self._held: tuple[list[Tensor], list[Tensor]] | None = None

    def run(self, read: Read, compute: Compute, write: Write) -> None:
        """Put the matrices together, compute, pack what leaves, write what stays."""
        if self._kept:
            read(self._task.kept, self._kept)
        if self._arrived:
            torch._foreach_copy_(self._places, self._arrived)
        leaving, kept = self._cut(compute(self._task, self._matrices))
        if leaving:
            with span("amo::scatter"):
                torch._foreach_copy_(self._packed, leaving)
        if kept:
            write(self._task.kept, kept)

    def _cut(self, results: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The parts of results that leave, and those that stay."""
        place = [(each.data_ptr(), each.stride(), each.dtype) for each in results]
        if self._held is None or place != self._known:
            task = self._task
            found = _in_boxes(task, results, self._leaving), _as_local(task, results, task.kept)
            # Views keep memory: only of results that come where they came the last time.
            self._held = found if place == self._known else None
            self._known = place
            return found
        return self._held


@dataclasses.dataclass(slots=True)
class _Route:
    """A bucket laid out: its transfers, and its tasks between the first two."""

    gather_send: _Side
    gather_receive: _Side
    deliver_send: _Side
    deliver_receive: _Side
    forward_send: _Side
    forward_receive: _Side
    forwards: bool
    """Whether any peer forwards; without, nothing is sent, not even empty parts."""
    forwarded: list[Tensor] = dataclasses.field(init=False)
    """Delivered results that this rank forwards."""
    tasks: list[_TaskRun] = dataclasses.field(default_factory=list)
    work: Any = None
    """Of the transfer under way: its gather, later its delivery, then what is forwarded."""

    def __post_init__(self) -> None:
        side = self.deliver_receive
        delivered = dict(zip(side.parts, side.views, strict=True))
        self.forwarded = [delivered[part] for part in self.forward_send.parts]

    def add(self, task: Task, matrices: Sequence[Tensor]) -> None:
        """Lay out a task, which puts its whole matrices into ``matrices``."""
        self.tasks.append(_TaskRun(task, matrices, self.gather_receive, self.deliver_send))

    def compute(self, read: Read, compute: Compute, write: Write) -> None:
        """Run all tasks."""
        for task in self.tasks:
            task.run(read, compute, write)

    def finish(self, write: Write) -> None:
        """Wait for the results that others forwarded, and write them."""
        if not self.forwards:
            return
        with span("amo::scatter"):
            self.work.wait()
        side = self.forward_receive
        if side.parts:
            write(side.parts, side.views)


def _in_boxes(task: Task, boxes: Sequence[Tensor], parts: Sequence[Part]) -> list[Tensor]:
    """Views of parts in the boxes of a task."""
    found = zip(task.owned, boxes, task.boxes, strict=True)
    known = {index: (tensor, top, left) for index, tensor, ((top, _), (left, _)) in found}
    views = []
    for part in parts:
        (top, bottom), (left, right) = part.piece.target
        tensor, row, column = known[part.matrix]
        views.append(tensor[top - row : bottom - row, left - column : right - column])
    return views


def _as_local(task: Task, boxes: Sequence[Tensor], parts: Sequence[Part]) -> list[Tensor]:
    """The same views, each in the shape that the part has in the local tensor."""
    views = _in_boxes(task, boxes, parts)
    return [view.view(part.piece.source_shape) for view, part in zip(views, parts, strict=True)]
