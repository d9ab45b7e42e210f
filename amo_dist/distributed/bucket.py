"""Buckets: matrices that travel together, their memory, and the collectives that move them.

This is the one module that moves matrices. It knows nothing of what is computed with them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from amo_dist.compat import all_gather_single
from amo_dist.distributed.layout import Matrix
from amo_dist.distributed.plan import (
    BucketPlan,
    ByPeer,
    ExchangePlan,
    Held,
    count_elements,
    space_of,
)

# Regions of all peers, one after the other.
_flat = itertools.chain.from_iterable


class _Packed(NamedTuple):
    """Regions side by side in memory, as one rank sends or receives them.

    Attributes:
        memory: Bytes of all regions, 1-D.
        sizes: Bytes by peer.
        parts: View ``(m, n)`` of the memory for each region.
    """

    memory: Tensor
    sizes: list[int]
    parts: list[Tensor]


class Bucket:
    """Matrices that travel together, on one rank; it serves step after step.

    A step fills ``outgoing``, gathers, computes ``wholes`` in place, scatters, and reads
    ``incoming``. If a bucket does not travel, both are views of ``wholes``. The buckets of an
    exchange take turns in one memory: a bucket starts to gather once the last one has gathered,
    and to scatter once the results of the last one are applied.

    Collectives start behind the work that the current stream already has, and waiting for one holds
    back later work of that stream, not the host: so shared memory is safe on CUDA, too. After an
    exception, safety rests on NCCL, which keeps the buffers of running collectives alive.

    Args:
        plan: Plan of the bucket.
        matrices: Matrices, which the plan indexes.
        pieces: The caller's name for each region of this rank.
        memory: Memory of the exchange, by its use.
        group: Process group of the ranks of all replicas; None where nothing travels.
        copies: Process group of the ranks with the same shards, one of each replica; None for a
            single replica.

    Attributes:
        owned: Indices of the matrices that this rank owns.
        wholes: The owned matrices, ``(m, n)``, from the end of the gather to the start of the
            scatter.
        sent: Pieces whose momentum this rank sends to owners, itself among them.
        outgoing: View ``(m, n)`` of the memory for each piece of ``sent``.
        received: Pieces whose results this rank receives.
        incoming: View ``(m, n)`` of the memory for each piece of ``received``.
        moves: Whether anything travels.
        label: Name of the caller for the bucket, for errors.
    """

    label = ""

    def __init__(
        self,
        plan: BucketPlan,
        matrices: Sequence[Matrix],
        pieces: Mapping[Held, Any],
        memory: Mapping[str, Tensor],
        group: dist.ProcessGroup | None = None,
        copies: dist.ProcessGroup | None = None,
    ) -> None:
        self.owned, self.moves = plan.owned, group is not None
        self._group, self._copies = group, copies
        shapes = [matrices[index].shape for index in plan.owned]
        spaces = list(map(space_of, shapes))
        parts = zip(memory["wholes"][: sum(spaces)].split(spaces), shapes, strict=True)
        self.wholes = [part[: math.prod(shape)].view(shape) for part, shape in parts]
        whole_by_matrix = dict(zip(plan.owned, self.wholes, strict=True))

        def in_wholes(by_peer: ByPeer) -> list[Tensor]:
            """Views of regions in their matrices."""
            rows = ((whole_by_matrix[matrix], *region.target) for matrix, region in _flat(by_peer))
            return [whole[slice(*edges), slice(*sides)] for whole, edges, sides in rows]

        self.sent = [pieces[held] for held in _flat(plan.to_owners)]
        self.received = [pieces[held] for held in _flat(plan.by_replica)]
        if not self.moves:
            self.outgoing, self.incoming = in_wholes(plan.to_owners), in_wholes(plan.by_replica)
            return
        regions = in_wholes(plan.from_holders)
        self._to_owners = _pack(plan.to_owners, memory["outgoing"])
        self._from_holders = _pack(plan.from_holders, memory["arriving"])
        self._arriving = _join(regions, self._from_holders.parts)
        self.outgoing, self.incoming = self._to_owners.parts, list[Tensor]()
        if not plan.by_replica:
            return
        self._to_holders = _pack(plan.from_holders, memory["leaving"])
        self._leaving = _join(regions, self._to_holders.parts)
        # Results of all replicas, in parts of equal length: the owners of this rank's own replica
        # send theirs to where the collective along the replicas expects them.
        length, num_replicas = plan.num_by_replica, len(plan.by_replica)
        results = memory["incoming"][: num_replicas * length].view(num_replicas, length)
        packed = [_pack([held], part) for held, part in zip(plan.by_replica, results, strict=True)]
        self.incoming += [x for own in packed for x in own.parts]
        own = packed[plan.place]
        self._from_owners = _Packed(own.memory, self._to_owners.sizes, own.parts)
        in_bytes = results.view(torch.uint8)
        self._all_results, self._own_results = in_bytes.flatten(), in_bytes[plan.place]

    def gather(self) -> Iterator[None]:
        """Send the momentum in ``outgoing`` into the ``wholes`` of owners; pauses on its way."""
        if self.moves:
            with record_function("amo::gather"):
                work = self._exchange(self._to_owners, self._from_holders)
            yield
            with record_function("amo::gather"):
                work.wait()
                for wholes, parts in self._arriving:
                    torch._foreach_copy_(wholes, parts)

    def scatter(self) -> Iterator[None]:
        """Send the results in ``wholes`` back, into ``incoming``; pauses on their way.

        They go to the shards of the owner's replica, and from there along the replica axis.
        """
        if self.moves:
            with record_function("amo::scatter"):
                for wholes, parts in self._leaving:
                    torch._foreach_copy_(parts, wholes)
                work = self._exchange(self._to_holders, self._from_owners)
                if self._copies is not None and self._all_results.numel():
                    work.wait()
                    work = all_gather_single(
                        self._all_results, self._own_results, self._copies, async_op=True
                    )
            yield
            with record_function("amo::scatter"):
                work.wait()

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


class Exchange:
    """The buckets of matrices with the same replicas; their memory is free between steps.

    Views of the memory stay valid while it is free. A CPU keeps it: there, new memory costs a step
    some percent. After an exception has left a step an exchange is made anew: what is under way
    must not arrive in the memory of a later step. Construction communicates nothing.

    Args:
        plan: Plan of this rank; it fixes the order of collectives, the same on all peers.
        matrices: Matrices, which the plan indexes.
        pieces: The caller's name for each region of this rank.
        group: Process group of the plan's peers; None on a single rank.
        copies: Process group of the plan's copies; None for a single replica.
        device: Device of the memory.
        dtype: Dtype in which matrices travel.

    Attributes:
        buckets: Local buckets first, then those that travel.
        sent_bytes: Bytes that this rank sends to others in a step.
    """

    def __init__(
        self,
        plan: ExchangePlan,
        matrices: Sequence[Matrix],
        pieces: Mapping[Held, Any],
        *,
        group: dist.ProcessGroup | None,
        copies: dist.ProcessGroup | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._device = device
        sizes = plan.num_elements(matrices)
        memory = {use: torch.empty(n, dtype=dtype, device=device) for use, n in sizes.items()}
        self._memory = [*memory.values()]
        fixed = matrices, pieces, memory
        self.buckets = [Bucket(bucket, *fixed) for bucket in plan.local]
        self.buckets += [Bucket(bucket, *fixed, group, copies) for bucket in plan.buckets]
        self.sent_bytes = plan.num_sent * dtype.itemsize

    def restore(self) -> None:
        """Bring the memory back, before the ranks vote on a step: there may be none left."""
        for tensor in self._memory:
            storage = tensor.untyped_storage()
            if storage.nbytes() < tensor.nbytes:
                storage.resize_(tensor.nbytes)

    def release(self) -> None:
        """Free the memory of a device until the next step."""
        if self._device.type != "cpu":
            for tensor in self._memory:
                tensor.untyped_storage().resize_(0)


def _pack(by_peer: Sequence[Sequence[Held]], memory: Tensor) -> _Packed:
    """Lay the regions of a transfer out in memory, of which it takes the first part."""
    sizes = list(map(count_elements, by_peer))
    regions = [region for _, region in _flat(by_peer)]
    used = memory[: sum(sizes)]
    flat = used.split([region.num_elements for region in regions])
    pairs = zip(flat, regions, strict=True)
    parts = [part.view(region.source_shape[-2:]) for part, region in pairs]
    return _Packed(used.view(torch.uint8), [size * memory.itemsize for size in sizes], parts)


def _join(wholes: Sequence[Tensor], parts: Sequence[Tensor]) -> list[list[list[Tensor]]]:
    """Regions of matrices and where they travel, in lists between which copies take few launches.

    A list of dense regions is one launch, and in another list each region is one. So regions with
    gaps between rows, at equal distances, become one of more dims: the columns of some rows first.
    """
    pairs = list(zip(wholes, parts, strict=True))
    dense = [pair for pair in pairs if pair[0].is_contiguous()]
    gaps: list[tuple[Tensor, ...]] = [pair for pair in pairs if not pair[0].is_contiguous()]
    gaps.sort(key=lambda pair: pair[0].storage_offset())
    for _ in range(2):
        runs: list[list[tuple[Tensor, ...]]] = []
        for pair in gaps:
            apart = _distances(runs[-1][-1], pair) if runs else None
            if apart and (len(runs[-1]) == 1 or apart == _distances(*runs[-1][:2])):
                runs[-1].append(pair)
            else:
                runs.append([pair])
        gaps = [_stacked(run) if len(run) > 1 else run[0] for run in runs]
    return [[list(own) for own in zip(*part, strict=True)] for part in (dense, gaps) if part]


def _distances(first: Sequence[Tensor], second: Sequence[Tensor]) -> list[int]:
    """Elements from each tensor of a pair to that of the next; none unless they are alike."""
    rows = list(zip(first, second, strict=True))
    if any(x.shape != y.shape or x.stride() != y.stride() for x, y in rows):
        return []
    return [int(y.storage_offset() - x.storage_offset()) for x, y in rows]


def _stacked(run: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    """Pairs at equal distances as one pair, whose first dim counts them."""
    rows = zip(run[0], _distances(*run[:2]), strict=True)
    return tuple(x.as_strided((len(run), *x.shape), (d, *x.stride())) for x, d in rows)


def on_host(places: Sequence[Tensor]) -> list[Tensor]:
    """New pinned host memory in the shapes of some places on a device.

    FSDP2's ``CPUOffloadPolicy`` keeps parameters, gradients and state in host memory. The host
    computes momentum and updates, and the accelerator everything between them: pieces are uploaded
    before the gather, so that matrices travel as those of device parameters do, and results are
    downloaded after the scatter.

    PyTorch keeps pinned memory for the next call, and reuses none that a copy still reads.
    """
    return [torch.empty_like(place, device="cpu", pin_memory=True) for place in places]


def bring_down(places: list[Tensor]) -> list[Tensor]:
    """Download places of a device, at least one, to the host; waits once, for all of them."""
    pieces = on_host(places)
    torch._foreach_copy_(pieces, places, non_blocking=True)
    torch.accelerator.current_stream(places[0].device).synchronize()
    return pieces
