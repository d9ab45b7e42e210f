"""Cost of an optimizer step on many ranks, from layouts and plans alone: flops, bytes, memory.

Seconds are not predicted: they depend on the machine.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch.distributed.tensor import Replicate, Shard

from amo_dist.config import MuonConfig
from amo_dist.distributed.bucket import BUCKETS_IN_FLIGHT
from amo_dist.distributed.layout import Matrix, make_matrix, mesh_layout
from amo_dist.distributed.plan import Job, assign, count_elements, plan_exchange
from amo_dist.schedule.allocate import ns_step_flops
from amo_dist.schedule.types import MatrixInfo


def lay_out(
    registry: Sequence[MatrixInfo], ranks: int, *, replica_size: int | None = None
) -> list[Matrix]:
    """Layouts of matrices that FSDP shards on dim 0, as `torch.chunk` does.

    Args:
        registry: Name and shape of the matrices.
        ranks: Size of the world, a multiple of ``replica_size``.
        replica_size: Consecutive ranks that share a replica; None for one replica.
    """
    mesh = torch.arange(ranks).view(-1, replica_size or ranks)
    placements = [Replicate(), Shard(0)]
    return [
        make_matrix(info.name, mesh_layout(info.shape, mesh, placements), index)
        for index, info in enumerate(registry)
    ]


class StepCost:
    """Cost of one optimizer step under a schedule, by rank.

    Args:
        registry: Name, shape and operator type of all matrices.
        matrices: Layouts of the matrices, in the same order.
        steps: Newton-Schulz steps by operator type.
        num_ranks: Number of ranks of the layouts.
        config: Settings of ownership and dtypes.

    Attributes:
        jobs: Matrix and owner of each piece of work.
        flops: Newton-Schulz flops by rank, float64 ``(num_ranks,)``.
        sent: Bytes that a rank sends, mean of all ranks.
    """

    def __init__(
        self,
        registry: Sequence[MatrixInfo],
        matrices: Sequence[Matrix],
        steps: Mapping[str, int],
        num_ranks: int,
        *,
        config: MuonConfig | None = None,
    ) -> None:
        self._matrices = matrices
        self._config = config = (config or MuonConfig()).in_force(has_bfloat16=True)
        assert config.wire_dtype is not None
        self._wire = getattr(torch, config.wire_dtype).itemsize
        counts = [steps[info.operator_type] for info in registry]
        costs = [
            float(count * ns_step_flops(*info.shape))
            for count, info in zip(counts, registry, strict=True)
        ]
        jobs = assign(matrices, costs, ownership=config.ownership).values()
        self.jobs: Sequence[Job] = [*itertools.chain(*jobs)]
        self.flops = torch.zeros(num_ranks, dtype=torch.float64)
        for job in self.jobs:
            self.flops[job.owner] += costs[job.matrix]
        sent = 0
        for job in self.jobs:
            matrix = matrices[job.matrix]
            copies = sum(replica[0] in job.targets for replica in matrix.replicas)
            sent += (1 + copies) * matrix.num_elements - 2 * matrix.num_held(job.owner)
        self.sent = self._wire * sent / num_ranks

    def memory(self) -> tuple[int, int]:
        """Peak bytes of the busiest rank: buffers of the exchange, and Newton-Schulz beside them.

        Buckets in flight take turns with the buffers of each kind of transfer, and the matrices of
        the current bucket are held once. A holder has a share of the matrices of every owner, and
        replicas multiply what an owner sends.
        """
        plan = plan_exchange(
            self._matrices,
            self.jobs,
            rank=int(self.flops.argmax()),
            peers=range(len(self.flops)),
            itemsize=self._wire,
            bucket_bytes=self._config.bucket_bytes,
        )
        buckets = plan.buckets or plan.local  # on one rank, which exchanges nothing
        shapes = [[self._matrices[index].shape for index in b.owned] for b in buckets]
        elements = max((sum(map(math.prod, part)) for part in shapes), default=0)
        for side in ("to_owners", "from_holders", "to_holders", "from_owners"):
            sizes = [sum(map(count_elements, getattr(bucket, side))) for bucket in buckets]
            for turn in range(BUCKETS_IN_FLIGHT):
                elements += max(sizes[turn::BUCKETS_IN_FLIGHT], default=0)
        itemsize = getattr(torch, self._config.ns_dtype).itemsize
        batches = [
            newton_schulz_bytes(count, shape, itemsize, wire=self._wire)
            for part in shapes
            for shape, count in Counter(part).items()
        ]
        return self._wire * elements, max(batches, default=0)


def newton_schulz_bytes(
    count: int, shape: Sequence[int], itemsize: int, *, wire: int | None = None
) -> int:
    """Peak bytes of Newton-Schulz on a batch, its stack included.

    The stack is scaled in float32, or wider, and rounded to the first iterate. A step then holds
    the stack, the first, the current and the next iterate, a Gram matrix and its polynomial. A pair
    of steps holds no more, because only long matrices take pairs.

    Args:
        count: Number of matrices in the batch.
        shape: Shape ``(m, n)`` of a matrix.
        itemsize: Bytes per element of the products.
        wire: Bytes per element of the stack; None for the same as the products.
    """
    elements, squares = count * math.prod(shape), count * min(shape) ** 2
    wire = wire or itemsize
    scaling = (itemsize + max(itemsize, wire, 4)) * elements
    products = itemsize * (3 * elements + 2 * squares)
    return wire * elements + max(scaling, products)
