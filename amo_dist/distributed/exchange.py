"""Sharded matrices in, a function from whole matrices to whole matrices, sharded results out.

The one module that calls collectives for matrices. It knows nothing of what is computed.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from amo_dist.distributed.layout import Box, MatrixLayout
from amo_dist.distributed.plan import Bucket, ExchangePlan, Part
from amo_dist.distributed.spans import span

Read = Callable[[Sequence[Part], Sequence[Tensor]], None]
"""Writes the values of pieces of this rank's local tensors into places, views in the shape of the
piece's source and in the dtype of the wire."""
Write = Callable[[Sequence[Part], Sequence[Tensor]], None]
"""Takes the results for pieces of this rank's local tensors, in the shape of the source. They are
lent: their memory is used again after the call."""
Compute = Callable[[Bucket, list[Tensor]], list[Tensor]]
"""Results for the owned matrices of a bucket, ``(m, n)`` each, in the dtype of the wire. The
matrices given are lent; so are the results on CPU, until the next call."""


_TASK_ELEMENTS = 2**21
"""Elements of the matrices that CPU computes together: few enough that caches hold results until
they are written, and enough that the code of each stage, which products drive from the caches as
well, runs for several matrices (of width 256) in a row."""


Task = Bucket


class _Side:
    """What one side of an all-to-all holds: pieces one after the other, by peer.

    Args:
        parts_by_peer: In the order in which they lie in the buffer.
    """

    def __init__(self, parts_by_peer: Sequence[Sequence[Part]]) -> None:
        self.parts = tuple(itertools.chain(*parts_by_peer))
        self.elements = [sum(part.piece.num_elements for part in each) for each in parts_by_peer]
        self._sizes = [part.piece.num_elements for part in self.parts]
        self._sources = [part.piece.source_shape for part in self.parts]
        boxes = (part.piece.target for part in self.parts)
        self._targets = [tuple(stop - start for start, stop in box) for box in boxes]

    def sources(self, buffer: Tensor) -> list[Tensor]:
        """Views of the pieces of a flat buffer, as they lie in local tensors."""
        return _views(buffer, self._sizes, self._sources)

    def targets(self, buffer: Tensor) -> list[Tensor]:
        """Views of the pieces of a flat buffer, as they lie in their matrices."""
        return _views(buffer, self._sizes, self._targets)


class _Task:
    """Matrices of one bucket that this rank computes together, and where their pieces are.

    Args:
        bucket: Of the task alone.
        arrivals: Of the whole bucket.
        departures: Of the whole bucket.
    """

    def __init__(self, bucket: Bucket, arrivals: _Side, departures: _Side) -> None:
        self.bucket = bucket
        self.kept = _Own(bucket.kept)
        self.returned = _Own(bucket.returned)
        self.arrivals = _of(bucket.owned, arrivals)
        self.departures = _of(bucket.owned, departures)


class _Own:
    """Pieces of owned matrices that this rank holds itself.

    Args:
        parts: These pieces.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)
        self._shapes = [part.piece.source_shape for part in parts]

    def views(self, whole: dict[int, Tensor]) -> list[Tensor]:
        """Views of whole matrices, each in the shape of the piece's source."""
        cuts = (_cut(whole[part.matrix], part.piece.target) for part in self.parts)
        return [cut.view(shape) for cut, shape in zip(cuts, self._shapes, strict=True)]


class _Route:
    """What a plan says of one bucket, laid out once for every step.

    Args:
        bucket: Of the plan.
        groups: Its owned matrices by task.
    """

    def __init__(self, bucket: Bucket, groups: Sequence[tuple[int, ...]]) -> None:
        self.wide = bucket.wide
        self.gather_send, self.gather_receive = map(
            _Side, (bucket.gather_send, bucket.gather_receive)
        )
        self.deliver_send, self.deliver_receive = map(
            _Side, (bucket.deliver_send, bucket.deliver_receive)
        )
        self.tasks = [
            _Task(_restricted(bucket, owned), self.gather_receive, self.deliver_send)
            for owned in groups
        ]


_Pending = list[tuple[_Task, list[Tensor]]]
"""Tasks whose results this rank has yet to write into its own shards."""


@dataclasses.dataclass(slots=True)
class _Flight:
    """An all-to-all under way, and the buffers that it needs until it has landed."""

    work: Any
    sent: Tensor
    received: Tensor


_Views = TypeVar("_Views")


class _Memory:
    """Buffers that all steps share on CPU, where fresh megabytes cost page faults.

    Elsewhere the caching allocator does this work.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_kept = device.type == "cpu"
        self._device = device
        self._held: dict[object, Tensor] = {}
        self._views: dict[object, tuple[tuple[Tensor, ...], Any]] = {}

    def take(self, use: object, num_elements: int, dtype: torch.dtype) -> Tensor:
        """A flat buffer of unspecified values, the same one for the same use."""
        num_bytes = num_elements * dtype.itemsize
        if not self._is_kept:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device).view(dtype)
        buffer = self._hold(use, num_bytes)
        key = use, num_elements, dtype
        return self.views(key, (buffer,), lambda: buffer[:num_bytes].view(dtype))

    def _hold(self, use: object, num_bytes: int) -> Tensor:
        held = self._held.get(use)
        if held is None or held.numel() < num_bytes:
            held = self._held[use] = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return held

    def views(self, use: object, buffers: tuple[Tensor, ...], make: Callable[[], _Views]) -> _Views:
        """What ``make`` derives from buffers: the same objects while the buffers are the same."""
        if not self._is_kept:
            return make()
        found = self._views.get(use)
        if found is None or any(a is not b for a, b in zip(found[0], buffers, strict=True)):
            found = self._views[use] = buffers, make()
        views: _Views = found[1]
        return views

    def clear(self) -> None:
        """Give all buffers up."""
        self._held.clear()
        self._views.clear()


class Exchange:
    """Runs one `ExchangePlan` on one rank.

    The order of collectives is fixed by the plan, and is the same on all peers. On CUDA they run
    on the communication stream of the process group; waiting for one blocks the current stream,
    not the host. There, the owned matrices of a bucket are computed together; on CPU a few at a
    time, so that they are in the caches from their assembly to their update.

    Args:
        plan: Of this rank.
        matrices: What the plan's indices mean.
        group: Process group of the plan's peers; None on a single rank.
        device: Where the local tensors live.
        wire_dtype: In which matrices travel.
        wide_dtype: In which matrices travel to their owner in wide buckets.
        buckets_in_flight: How many gathers may be under way at once.
        kinds: Of each matrix, sortable: on CPU, those of one kind are computed next to each other.
    """

    def __init__(
        self,
        plan: ExchangePlan,
        matrices: Sequence[MatrixLayout],
        *,
        group: dist.ProcessGroup | None,
        device: torch.device,
        wire_dtype: torch.dtype,
        wide_dtype: torch.dtype,
        buckets_in_flight: int,
        split: Any = None,
    ) -> None:
        self.plan = plan
        self.sent_bytes: Counter[int] = Counter()
        """Bytes sent to each peer in the last `run`."""
        self.sent_elements: Counter[int] = Counter()
        """Elements sent to each peer in the last `run`."""
        self._matrices = matrices
        self._split = split
        self._group = group
        self._wire_dtype = wire_dtype
        self._wide_dtype = wide_dtype
        self._buckets_in_flight = buckets_in_flight
        self._is_split = device.type == "cpu"
        self._local, self._routes = (
            [_Route(bucket, self._groups(bucket)) for bucket in buckets]
            for buckets in (plan.local, plan.buckets)
        )
        self._memory = _Memory(device)

    def _groups(self, bucket: Bucket) -> list[tuple[int, ...]]:
        """The owned matrices by task: all together, or on CPU a few at a time."""
        return (
            self._split(bucket.owned) if self._split else ([bucket.owned] if bucket.owned else [])
        )

    def run(
        self,
        read: Read,
        compute: Compute,
        write: Write,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Gather, compute, deliver and write back every matrix once.

        Args:
            read: Called for pieces before they are sent.
            compute: Called for the owned matrices of each bucket, together or a few at a time.
            write: Called for pieces whose results have arrived.
            meanwhile: Work that needs no exchange; done while the first buckets travel.
        """
        self.sent_bytes.clear()
        self.sent_elements.clear()
        try:
            self._run(read, compute, write, meanwhile)
        except BaseException:
            # What is still under way must not arrive in the buffers of a later step.
            self._memory.clear()
            raise

    def _run(
        self, read: Read, compute: Compute, write: Write, meanwhile: Callable[[], None] | None
    ) -> None:
        ahead = self._buckets_in_flight
        gathers: deque[_Flight] = deque(
            self._start_gather(index, read) for index in range(min(ahead, len(self._routes)))
        )
        if meanwhile is not None:
            meanwhile()
        for route in self._local:
            pending, _ = self._compute(route, {}, None, read, compute, write)
            self._write_pending(pending, write)
        landing: tuple[_Route, _Flight] | None = None
        for index, route in enumerate(self._routes):
            arrived = self._land(route, gathers.popleft())
            pending, sent = self._compute(route, arrived, index % 2, read, compute, write)
            delivery = self._start_delivery(index, sent)
            if index + ahead < len(self._routes):
                gathers.append(self._start_gather(index + ahead, read))
            self._write_pending(pending, write)
            if landing is not None:
                self._finish_delivery(*landing, write)
            landing = (route, delivery)
        if landing is not None:
            self._finish_delivery(*landing, write)

    def _start_gather(self, index: int, read: Read) -> _Flight:
        route, slot = self._routes[index], index % self._buckets_in_flight
        with span("amo::gather"):
            side, dtype = route.gather_send, self._gather_dtype(route)
            sent = self._buffer("gather send", slot, side, dtype)
            if side.parts:
                read(side.parts, self._sources(side, sent))
            received = self._buffer("gather receive", slot, route.gather_receive, dtype)
            return self._start(sent, received, side, route.gather_receive)

    def _land(self, route: _Route, flight: _Flight) -> dict[int, Tensor]:
        """Views of what has arrived, by position; they keep its memory."""
        with span("amo::gather"):
            flight.work.wait()
        return dict(enumerate(self._targets(route.gather_receive, flight.received)))

    def _compute(
        self,
        route: _Route,
        arrived: dict[int, Tensor],
        slot: int | None,
        read: Read,
        compute: Compute,
        write: Write,
    ) -> tuple[_Pending, Tensor]:
        """Compute all tasks; the results still to be written here, and those packed to be sent."""
        pending: _Pending = []
        sent: Tensor | None = None
        for task in route.tasks:
            results = compute(task.bucket, self._assemble(route, task, arrived, read))
            if task.departures:
                sent = self._buffer("deliver send", slot, route.deliver_send, self._wire_dtype)
                self._pack(task, results, self._targets(route.deliver_send, sent))
            pending.append((task, results))
            if self._is_split:
                self._write_pending(pending, write)
        if sent is None:
            sent = self._buffer("deliver send", slot, route.deliver_send, self._wire_dtype)
        return pending, sent

    def _pack(self, task: _Task, results: Sequence[Tensor], places: Sequence[Tensor]) -> None:
        with span("amo::scatter"):
            whole = dict(zip(task.bucket.owned, results, strict=True))
            values = [_cut(whole[part.matrix], part.piece.target) for _, part in task.departures]
            torch._foreach_copy_([places[place] for place, _ in task.departures], values)

    def _assemble(
        self, route: _Route, task: _Task, arrived: dict[int, Tensor], read: Read
    ) -> list[Tensor]:
        """Whole matrices of a task, from this rank's own pieces and those that have arrived."""
        dtype = self._gather_dtype(route)
        shapes = [self._matrices[index].shape for index in task.bucket.owned]
        buffers = tuple(
            self._memory.take(("whole", place), math.prod(shape), dtype)
            for place, shape in enumerate(shapes)
        )

        def lay_out() -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
            matrices = [flat.view(shape) for flat, shape in zip(buffers, shapes, strict=True)]
            whole = dict(zip(task.bucket.owned, matrices, strict=True))
            places = [_cut(whole[part.matrix], part.piece.target) for _, part in task.arrivals]
            return matrices, task.kept.views(whole), places

        matrices, kept, places = self._memory.views(task, buffers, lay_out)
        if task.kept.parts:
            read(task.kept.parts, kept)
        if task.arrivals:
            torch._foreach_copy_(places, [arrived.pop(place) for place, _ in task.arrivals])
        return list(matrices)

    def _write_pending(self, pending: _Pending, write: Write) -> None:
        while pending:  # popped, or a result would stay until the next one takes its name
            task, results = pending.pop(0)
            if task.returned.parts:
                whole = dict(zip(task.bucket.owned, results, strict=True))
                write(task.returned.parts, task.returned.views(whole))

    def _start_delivery(self, index: int, sent: Tensor) -> _Flight:
        send, receive = self._routes[index].deliver_send, self._routes[index].deliver_receive
        with span("amo::scatter"):
            received = self._buffer("deliver receive", index % 2, receive, self._wire_dtype)
            return self._start(sent, received, send, receive)

    def _finish_delivery(self, route: _Route, flight: _Flight, write: Write) -> None:
        with span("amo::scatter"):
            flight.work.wait()
            values = self._sources(route.deliver_receive, flight.received)
        if values:
            write(route.deliver_receive.parts, values)

    def _sources(self, side: _Side, buffer: Tensor) -> list[Tensor]:
        return self._memory.views(("sources", side), (buffer,), lambda: side.sources(buffer))

    def _targets(self, side: _Side, buffer: Tensor) -> list[Tensor]:
        return self._memory.views(("targets", side), (buffer,), lambda: side.targets(buffer))

    def _gather_dtype(self, route: _Route) -> torch.dtype:
        return self._wide_dtype if route.wide else self._wire_dtype

    def _buffer(self, use: str, slot: int | None, side: _Side, dtype: torch.dtype) -> Tensor:
        return self._memory.take((use, slot), sum(side.elements), dtype)

    def _start(self, sent: Tensor, received: Tensor, send: _Side, receive: _Side) -> _Flight:
        """Start a ragged all-to-all, without padding.

        Buffers travel as bytes, so that every backend takes every dtype.
        """
        size = sent.element_size()
        send_sizes = [count * size for count in send.elements]
        receive_sizes = [count * size for count in receive.elements]
        work = dist.all_to_all_single(
            received.view(torch.uint8),
            sent.view(torch.uint8),
            receive_sizes,
            send_sizes,
            group=self._group,
            async_op=True,
        )
        for peer, count in zip(self.plan.peers, send.elements, strict=True):
            if count:
                self.sent_bytes[peer] += count * size
                self.sent_elements[peer] += count
        return _Flight(work, sent, received)


def _restricted(bucket: Bucket, owned: tuple[int, ...]) -> Bucket:
    """What of a bucket concerns some of its owned matrices, apart from what travels."""
    kept, returned = (
        tuple(part for part in parts if part.matrix in owned)
        for parts in (bucket.kept, bucket.returned)
    )
    reported = bucket.reported.intersection(owned)
    return dataclasses.replace(bucket, owned=owned, reported=reported, kept=kept, returned=returned)


def _of(owned: Sequence[int], side: _Side) -> list[tuple[int, Part]]:
    """The parts of some matrices, each with its position on a side."""
    return [(place, part) for place, part in enumerate(side.parts) if part.matrix in owned]


def _cut(matrix: Tensor, box: Box) -> Tensor:
    (top, bottom), (left, right) = box
    return matrix[top:bottom, left:right]


def _views(buffer: Tensor, sizes: list[int], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The consecutive pieces of a flat buffer."""
    parts = buffer.split(sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
