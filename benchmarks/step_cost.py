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
from amo_dist.distributed.layout import Matrix, make_matrix, mesh_layout
from amo_dist.distributed.plan import assign, copies_of, plan_exchange
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
        owners: Owner of each matrix by its index.
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
        self.flops = torch.zeros(num_ranks, dtype=torch.float64)
        self.owners: dict[int, int] = {}
        sent = 0
        self._owners = assign(matrices, costs, ownership=config.ownership)
        for replicas, owners in self._owners.items():
            self.owners |= owners
            for index, owner in owners.items():
                self.flops[owner] += costs[index]
                matrix = matrices[index]
                sent += (1 + len(replicas)) * matrix.num_elements - 2 * matrix.num_held(owner)
        self.sent = self._wire * sent / num_ranks

    def memory(self) -> tuple[int, int]:
        """Peak bytes of the busiest rank: buffers of the exchange, and Newton-Schulz beside them.

        The buckets of an exchange take turns in one memory. A holder has a share of the matrices of
        every owner, and results come from the owners of all replicas.
        """
        rank, buffers, batches = int(self.flops.argmax()), 0, [0]
        itemsize = getattr(torch, self._config.ns_dtype).itemsize
        for replicas, owners in self._owners.items():
            plan = plan_exchange(
                self._matrices,
                owners,
                replicas,
                rank=rank,
                peers=sorted(itertools.chain(*replicas)),
                copies=copies_of(replicas, rank),
                itemsize=self._wire,
                bucket_bytes=self._config.bucket_bytes,
            )
            buffers += self._wire * sum(plan.num_elements(self._matrices).values())
            for bucket in (*plan.local, *plan.buckets):
                shapes = Counter(self._matrices[index].shape for index in bucket.owned)
                batches += [
                    newton_schulz_bytes(count, shape, itemsize, wire=self._wire)
                    for shape, count in shapes.items()
                ]
        return buffers, max(batches)


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
