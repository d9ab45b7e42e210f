"""From owners and schedules to the exchanges of a step."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.distributed as dist

from amo_dist.config import MuonConfig
from amo_dist.distributed.agreement import check_alike_by_ranks
from amo_dist.distributed.exchange import Exchange
from amo_dist.distributed.ownership import assign
from amo_dist.distributed.plan import plan_exchange
from amo_dist.engine.parameters import Parameters
from amo_dist.engine.world import World
from amo_dist.kernels.elementwise import wide_dtype
from amo_dist.schedule.budget import ns_step_flops
from amo_dist.schedule.types import Schedule

_TASK_ELEMENTS = 2**21
"""Elements of the matrices that CPU computes together: few enough that caches hold results until
they are written, and enough that the code of each stage, which products drive from the caches as
well, runs for several matrices (of width 256) in a row."""


def plan_exchanges(
    parameters: Parameters,
    schedules: Sequence[Schedule],
    observed: frozenset[str],
    *,
    world: World,
    config: MuonConfig,
    device: torch.device,
) -> list[Exchange]:
    """Deal the matrices to owners and plan who sends what; a collective over the world.

    Args:
        parameters: Of this process.
        schedules: Of each matrix: its cost is that of its Newton-Schulz steps.
        observed: Names of the matrices that travel in the dtype of momentum.
        world: Process groups.
        config: Ownership, buckets, dtypes.
        device: Of the local tensors.

    Returns:
        One exchange for each set of ranks that shares matrices with this one.

    Raises:
        RankMismatchError: On every rank, where ranks of a set plan differently.
    """
    matrices = parameters.matrices
    costs = [
        float(schedule.num_steps * ns_step_flops(*matrix.shape))
        for matrix, schedule in zip(matrices, schedules, strict=True)
    ]
    jobs = assign(matrices, costs, ownership=config.ownership, owners=config.owners)
    wire_dtype: torch.dtype = getattr(torch, config.ns_dtype)
    # Momentum is read in float32 at least, and what is observed must not be rounded to less.
    observed_dtype = wide_dtype(getattr(torch, config.momentum_dtype))
    wide = frozenset(i for i, matrix in enumerate(matrices) if matrix.name in observed)
    sizes = [
        matrix.num_elements * (observed_dtype if i in wide else wire_dtype).itemsize
        for i, matrix in enumerate(matrices)
    ]
    split = functools.partial(_split_for_caches, parameters) if device.type == "cpu" else None
    exchanges: list[Exchange] = []
    digests: dict[tuple[int, ...], str] = {}
    for ranks, group in world.groups_by_ranks.items():
        here = [job for job in jobs if tuple(sorted(matrices[job.matrix].ranks)) == ranks]
        plan = plan_exchange(
            matrices,
            here,
            rank=world.rank,
            peers=ranks if group is None else dist.get_process_group_ranks(group),
            bytes_by_matrix=sizes,
            bucket_bytes=config.bucket_bytes,
            wide=wide,
            split=split,
        )
        digests[ranks] = plan.digest
        if here:
            exchange = Exchange(
                plan,
                matrices,
                group=group,
                device=device,
                wire_dtype=wire_dtype,
                wide_dtype=observed_dtype,
                buckets_in_flight=config.buckets_in_flight,
            )
            exchanges.append(exchange)
    check_alike_by_ranks("exchange plan", digests, world.group)
    return exchanges


def _split_for_caches(parameters: Parameters, owned: tuple[int, ...]) -> list[tuple[int, ...]]:
    """A few matrices at a time: they stay in the caches from their assembly to their update."""
    matrices, types = parameters.matrices, parameters.operator_types
    tasks: list[tuple[int, ...]] = []
    room = 0
    # What may run as one batch has one shape and, once types have schedules of their own, one type.
    for index in sorted(owned, key=lambda index: (matrices[index].shape, types[index])):
        size = matrices[index].num_elements
        if size > room:
            tasks.append(())
            room = _TASK_ELEMENTS
        tasks[-1] += (index,)
        room -= size
    return tasks
