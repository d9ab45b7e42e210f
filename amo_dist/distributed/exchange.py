"""Sharded matrices in, a function from whole matrices to whole matrices, sharded results out.

The one module that calls collectives for matrices. It knows nothing of what is computed.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from amo_dist.distributed.layout import Box, MatrixLayout
from amo_dist.distributed.plan import Bucket, ExchangePlan, Part, count_elements

Read = Callable[[Sequence[Part]], list[torch.Tensor]]
"""Values of pieces of this rank's local tensors, in the shape of the piece's source."""
Write = Callable[[Sequence[Part], list[torch.Tensor]], None]
"""Takes the results for pieces of this rank's local tensors, in the shape of the source."""
Compute = Callable[[Bucket, list[torch.Tensor]], list[torch.Tensor]]
"""Results for the owned matrices of a bucket, ``(m, n)`` each, in the dtype of the wire."""


@dataclasses.dataclass(slots=True)
class _Flight:
    """An all-to-all under way, and the buffers that it needs until it has landed."""

    work: Any
    sent: torch.Tensor
    received: torch.Tensor


class Exchange:
    """Runs one `ExchangePlan` on one rank.

    The order of collectives is fixed by the plan, and is the same on all peers. On CUDA they run
    on the communication stream of the process group; waiting for one blocks the current stream,
    not the host.

    Args:
        plan: Of this rank.
        matrices: What the plan's indices mean.
        group: Process group of the plan's peers; None on a single rank.
        device: Where the local tensors live.
        wire_dtype: In which matrices travel.
        wide_dtype: In which matrices travel to their owner in wide buckets.
        buckets_in_flight: How many gathers may be under way at once.
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
    ) -> None:
        self.plan = plan
        self.sent_bytes: Counter[int] = Counter()
        """Bytes sent to each peer in the last `run`."""
        self.sent_elements: Counter[int] = Counter()
        """Elements sent to each peer in the last `run`."""
        self._matrices = matrices
        self._group = group
        self._device = device
        self._wire_dtype = wire_dtype
        self._wide_dtype = wide_dtype
        self._buckets_in_flight = buckets_in_flight

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
            compute: Called once for each bucket in which this rank owns matrices.
            write: Called once for each group of pieces whose results have arrived.
            meanwhile: Work that needs no exchange; done while the first buckets travel.
        """
        self.sent_bytes.clear()
        self.sent_elements.clear()
        buckets = self.plan.buckets
        gathers: deque[_Flight] = deque(
            self._start_gather(bucket, read) for bucket in buckets[: self._buckets_in_flight]
        )
        if meanwhile is not None:
            meanwhile()
        for bucket in self.plan.local:
            matrices = self._assemble(bucket, read, None)
            self._write_own(bucket, compute(bucket, matrices), write)
        landing: tuple[Bucket, _Flight] | None = None
        for index, bucket in enumerate(buckets):
            matrices = self._assemble(bucket, read, gathers.popleft())
            results = compute(bucket, matrices) if bucket.owned else []
            del matrices
            delivery = self._start_delivery(bucket, results)
            following = index + self._buckets_in_flight
            if following < len(buckets):
                gathers.append(self._start_gather(buckets[following], read))
            self._write_own(bucket, results, write)
            del results  # or it would stay until the next bucket's results take its name
            if landing is not None:
                self._finish_delivery(*landing, write)
            landing = (bucket, delivery)
        if landing is not None:
            self._finish_delivery(*landing, write)

    def _gather_dtype(self, bucket: Bucket) -> torch.dtype:
        return self._wide_dtype if bucket.wide else self._wire_dtype

    def _start_gather(self, bucket: Bucket, read: Read) -> _Flight:
        with record_function("amo::gather"):
            parts = [part for to_peer in bucket.gather_send for part in to_peer]
            return self._start(
                read(parts) if parts else [],
                bucket.gather_send,
                bucket.gather_receive,
                self._gather_dtype(bucket),
            )

    def _assemble(self, bucket: Bucket, read: Read, flight: _Flight | None) -> list[torch.Tensor]:
        """Whole matrices of this rank's jobs, from received pieces and its own."""
        dtype = self._gather_dtype(bucket)
        whole = {
            index: torch.empty(self._matrices[index].shape, dtype=dtype, device=self._device)
            for index in bucket.owned
        }
        parts = list(bucket.kept)
        values = [
            value.reshape(_shape(part.piece.target))
            for part, value in zip(parts, read(parts) if parts else [], strict=True)
        ]
        if flight is not None:
            with record_function("amo::gather"):
                flight.work.wait()
            received = [part for from_peer in bucket.gather_receive for part in from_peer]
            values += _unpack(flight.received, [_shape(part.piece.target) for part in received])
            parts += received
        places = [_cut(whole[part.matrix], part.piece.target) for part in parts]
        if places:
            torch._foreach_copy_(places, values)
        return list(whole.values())

    def _start_delivery(self, bucket: Bucket, results: Sequence[torch.Tensor]) -> _Flight:
        with record_function("amo::scatter"):
            whole = dict(zip(bucket.owned, results, strict=True))
            pieces = [
                _cut(whole[part.matrix], part.piece.target)
                for to_peer in bucket.deliver_send
                for part in to_peer
            ]
            return self._start(
                pieces, bucket.deliver_send, bucket.deliver_receive, self._wire_dtype
            )

    def _finish_delivery(self, bucket: Bucket, flight: _Flight, write: Write) -> None:
        with record_function("amo::scatter"):
            flight.work.wait()
            parts = [part for from_peer in bucket.deliver_receive for part in from_peer]
            values = _unpack(flight.received, [_shape(part.piece.source) for part in parts])
        if parts:
            write(parts, values)

    def _write_own(self, bucket: Bucket, results: Sequence[torch.Tensor], write: Write) -> None:
        whole = dict(zip(bucket.owned, results, strict=True))
        values = [
            _cut(whole[part.matrix], part.piece.target).reshape(_shape(part.piece.source))
            for part in bucket.returned
        ]
        if values:
            write(bucket.returned, values)

    def _start(
        self,
        values: Sequence[torch.Tensor],
        to_peers: Sequence[Sequence[Part]],
        from_peers: Sequence[Sequence[Part]],
        dtype: torch.dtype,
    ) -> _Flight:
        """Pack ``values`` and start a ragged all-to-all, without padding.

        Buffers travel as bytes, so that every backend takes every dtype.
        """
        send_sizes = [count_elements(parts) * dtype.itemsize for parts in to_peers]
        receive_sizes = [count_elements(parts) * dtype.itemsize for parts in from_peers]
        sent = torch.empty(sum(send_sizes), dtype=torch.uint8, device=self._device)
        if values:
            places = _unpack(sent.view(dtype), [tuple(value.shape) for value in values])
            torch._foreach_copy_(places, list(values))
        received = torch.empty(sum(receive_sizes), dtype=torch.uint8, device=self._device)
        work = dist.all_to_all_single(
            received, sent, receive_sizes, send_sizes, group=self._group, async_op=True
        )
        for peer, size in zip(self.plan.peers, send_sizes, strict=True):
            if size:
                self.sent_bytes[peer] += size
                self.sent_elements[peer] += size // dtype.itemsize
        return _Flight(work, sent, received.view(dtype))


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def _cut(matrix: torch.Tensor, box: Box) -> torch.Tensor:
    (top, bottom), (left, right) = box
    return matrix[top:bottom, left:right]


def _unpack(buffer: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Views of the consecutive pieces of a flat buffer."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [
        part.view(tuple(shape)) for part, shape in zip(buffer.split(sizes), shapes, strict=True)
    ]
