"""Buckets: matrices that travel together, their memory, and the collectives that move them.

This is the one module that moves matrices. It knows nothing of what is computed with them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from amo_dist.distributed.layout import Matrix
from amo_dist.distributed.plan import BucketPlan, ByPeer, ExchangePlan, Held, count_elements

# Buckets whose buffers are in use at once: bucket k takes those of bucket k - 2.
BUCKETS_IN_FLIGHT = 2

# Elements. Each whole matrix starts at a multiple of this, aligned like a tensor of its own: the
# bits of a product may depend on that.
_ALIGNMENT = 64


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
    ``incoming``. If a bucket does not travel, both are views of ``wholes``.

    Collectives start behind the work that the current stream already has, and waiting for one holds
    back later work of that stream, not the host: so shared memory is safe on CUDA, too. After an
    exception, safety rests on NCCL, which keeps the buffers of running collectives alive.

    Attributes:
        owned: Indices of the matrices that this rank owns.
        wholes: The owned matrices, ``(m, n)``. Buckets share this memory: the matrices of one are
            there from the end of its gather to the start of its scatter.
        sent: Pieces whose momentum this rank sends to owners, itself among them.
        outgoing: View ``(m, n)`` of the memory for each piece of ``sent``.
        received: Pieces whose results owners send to this rank.
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
        memory: Tensor,
        sides: Sequence[_Packed],
        group: dist.ProcessGroup | None,
    ) -> None:
        self.owned, self.moves, self._group = plan.owned, bool(sides), group
        shapes = [matrices[index].shape for index in plan.owned]
        spaces = list(map(_space, shapes))
        parts = zip(memory[: sum(spaces)].split(spaces), shapes, strict=True)
        self.wholes = [part[: math.prod(shape)].view(shape) for part, shape in parts]
        self.sent, self.received = (
            [pieces[held] for held in _flat(by_peer)]
            for by_peer in (plan.to_owners, plan.from_owners)
        )
        whole_by_matrix = dict(zip(plan.owned, self.wholes, strict=True))

        def in_wholes(regions: Iterable[Held]) -> list[Tensor]:
            """Views of regions in their matrices."""
            rows = ((whole_by_matrix[matrix], *region.target) for matrix, region in regions)
            return [whole[slice(*edges), slice(*sides)] for whole, edges, sides in rows]

        if self.moves:
            self._to_owners, self._from_holders, self._to_holders, self._from_owners = sides
            self._wholes_in = in_wholes(_flat(plan.from_holders))
            self._wholes_out = in_wholes(_flat(plan.to_holders))
            self.outgoing, self.incoming = self._to_owners.parts, self._from_owners.parts
        else:
            self.outgoing = in_wholes(_flat(plan.to_owners))
            self.incoming = in_wholes(_flat(plan.from_owners))

    def gather(self) -> Iterator[None]:
        """Send the momentum in ``outgoing`` into the ``wholes`` of owners; pauses on its way."""
        if self.moves:
            with record_function("amo::gather"):
                work = self._exchange(self._to_owners, self._from_holders)
            yield
            with record_function("amo::gather"):
                work.wait()
                if self._wholes_in:
                    torch._foreach_copy_(self._wholes_in, self._from_holders.parts)

    def scatter(self) -> Iterator[None]:
        """Send the results in ``wholes`` back, into ``incoming``; pauses on their way."""
        if self.moves:
            with record_function("amo::scatter"):
                if self._wholes_out:
                    torch._foreach_copy_(self._to_holders.parts, self._wholes_out)
                work = self._exchange(self._to_holders, self._from_owners)
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
    """The buckets of one set of ranks, and their memory, which is free between steps.

    Views of the memory stay valid while it is free. A CPU keeps it: there, new memory costs a step
    some percent. After an exception has left a step an exchange is made anew: what is under way
    must not arrive in the memory of a later step. Construction communicates nothing.

    Args:
        plan: Plan of this rank; it fixes the order of collectives, the same on all peers.
        matrices: Matrices, which the plan indexes.
        pieces: The caller's name for each region of this rank.
        group: Process group of the plan's peers; None on a single rank.
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
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._device, self._memory = device, list[Tensor]()
        plans = [*plan.local, *plan.buckets]
        size = max((sum(_space(matrices[i].shape) for i in p.owned) for p in plans), default=0)
        wholes = torch.empty(size, dtype=dtype, device=device)
        self._memory.append(wholes)
        fields = ("to_owners", "from_holders", "to_holders", "from_owners")
        sides = [self._pack([getattr(p, field) for p in plan.buckets], dtype) for field in fields]
        self.buckets = [Bucket(p, matrices, pieces, wholes, (), None) for p in plan.local]
        sides_by_bucket = zip(plan.buckets, *sides, strict=True)
        self.buckets += [
            Bucket(p, matrices, pieces, wholes, own, group) for p, *own in sides_by_bucket
        ]
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

    def _pack(self, transfers: Sequence[ByPeer], dtype: torch.dtype) -> list[_Packed]:
        """One side of the transfers of all buckets, which take turns in two buffers."""
        sizes = [
            [dtype.itemsize * count_elements(held) for held in by_peer] for by_peer in transfers
        ]
        totals = list(map(sum, sizes))
        most = (max(totals[n::BUCKETS_IN_FLIGHT], default=0) for n in range(BUCKETS_IN_FLIGHT))
        slots = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in most]
        self._memory += slots
        packed = []
        for index, by_peer in enumerate(transfers):
            slot = slots[index % BUCKETS_IN_FLIGHT][: totals[index]]
            regions = [region for _, region in _flat(by_peer)]
            flat = slot.view(dtype).split([region.num_elements for region in regions])
            pairs = zip(flat, regions, strict=True)
            parts = [part.view(region.source_shape[-2:]) for part, region in pairs]
            packed.append(_Packed(slot, sizes[index], parts))
        return packed


def _flat(by_peer: ByPeer) -> Iterator[Held]:
    return itertools.chain.from_iterable(by_peer)


def _space(shape: tuple[int, int]) -> int:
    """Elements that a matrix takes in memory, padded."""
    return -(-math.prod(shape) // _ALIGNMENT) * _ALIGNMENT


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
