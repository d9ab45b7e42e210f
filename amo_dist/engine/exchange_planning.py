"""From owners and schedules to the exchanges of a step."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist

from amo_dist.config import MuonConfig
from amo_dist.distributed.agreement import check_alike_by_ranks
from amo_dist.distributed.exchange import Exchange
from amo_dist.distributed.groups import Membership
from amo_dist.distributed.ownership import Teams, assign, imbalance
from amo_dist.distributed.plan import plan_exchange
from amo_dist.distributed.relays import relay
from amo_dist.distributed.team_groups import TeamGroup
from amo_dist.engine.parameters import Parameters
from amo_dist.engine.world import World
from amo_dist.kernels.elementwise import wide_dtype
from amo_dist.kernels.interface import Kernels
from amo_dist.schedule.budget import ns_step_flops
from amo_dist.schedule.types import Schedule

logger = logging.getLogger(__name__)

_WORTH_TELLING = 0.98
"""Of the greatest load: a gain of less is no reason to leave the order of the names."""


def plan_exchanges(
    parameters: Parameters,
    schedules: Sequence[Schedule],
    wide: frozenset[str],
    measured: frozenset[str],
    *,
    world: World,
    membership: Membership,
    config: MuonConfig,
    kernels: Kernels,
) -> list[Exchange]:
    """Deal the matrices to owners and plan who sends what; a collective over the world.

    Args:
        parameters: Of this process.
        schedules: Of each matrix: its cost is that of its Newton-Schulz steps.
        wide: Names of the matrices that travel in the dtype of momentum.
        measured: Names of the matrices that one rank must have whole.
        world: Process groups.
        membership: Makes those of new teams.
        config: Ownership, buckets, dtypes.
        kernels: Say how many matrices are best computed together.

    Returns:
        One exchange for each set of ranks that shares matrices with this one.

    Raises:
        RankMismatchError: On every rank, where ranks of a set plan differently.
    """
    matrices, costs = parameters.matrices, _costs(parameters, schedules)
    wire_dtype: torch.dtype = getattr(torch, config.ns_dtype)
    are_whole = frozenset(i for i, matrix in enumerate(matrices) if matrix.name in measured)
    teams = Teams(config.max_team, wire_dtype.itemsize, are_whole)
    jobs = assign(matrices, costs, ownership=config.ownership, owners=config.owners, teams=teams)
    if teams.most > 1:
        own = {job.team for job in jobs if job.team and job.owner == world.rank}
        made = membership.groups(own - world.teams.keys(), world.group)
        world.teams.update({ranks: TeamGroup(group) for ranks, group in made.items() if group})
    jobs = relay(matrices, jobs, world.node_by_rank)
    # Momentum is read in float32 at least, and what is measured must not be rounded to less.
    momentum_dtype = wide_dtype(getattr(torch, config.momentum_dtype))
    are_wide = frozenset(i for i, matrix in enumerate(matrices) if matrix.name in wide)
    sizes = [
        matrix.num_elements * (momentum_dtype if i in are_wide else wire_dtype).itemsize
        for i, matrix in enumerate(matrices)
    ]
    most = kernels.task_elements
    split = None if most is None else functools.partial(_split, parameters, most)
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
            wide=are_wide,
            split=split,
        )
        digests[ranks] = plan.digest
        if here:
            exchange = Exchange(
                plan,
                group=group,
                device=parameters.device,
                wire_dtype=wire_dtype,
                wide_dtype=momentum_dtype,
                buckets_in_flight=config.buckets_in_flight,
            )
            exchanges.append(exchange)
    check_alike_by_ranks("exchange plan", digests, world.group)
    return exchanges


def tell_balance(
    parameters: Parameters, schedules: Sequence[Schedule], *, world: World, config: MuonConfig
) -> None:
    """Log, on the first rank, what ``ownership = "balanced"`` would gain where that is much.

    Arguments are those of `plan_exchanges`.
    """
    if not world.leads or config.ownership == "balanced":
        return
    matrices, costs = parameters.matrices, _costs(parameters, schedules)
    ranks = {rank for matrix in matrices for rank in matrix.ranks}
    found, possible = (
        imbalance(assign(matrices, costs, ownership=how, owners=config.owners), costs, len(ranks))
        for how in (config.ownership, "balanced")
    )
    if possible < _WORTH_TELLING * found:
        logger.info(
            "Newton-Schulz of the busiest of %d ranks takes %.3f of the mean by ownership = %r, "
            "%.3f by 'balanced'",
            *(len(ranks), found, config.ownership, possible),
        )


def _costs(parameters: Parameters, schedules: Sequence[Schedule]) -> list[float]:
    """Flops of each matrix."""
    return [
        float(schedule.num_steps * ns_step_flops(*matrix.shape))
        for matrix, schedule in zip(parameters.matrices, schedules, strict=True)
    ]


def _split(
    parameters: Parameters, most_elements: int, owned: tuple[int, ...]
) -> list[tuple[int, ...]]:
    """Matrices to compute together: as many as the caches hold from assembly to update."""
    matrices, types = parameters.matrices, parameters.operator_types
    tasks: list[tuple[int, ...]] = []
    room = 0
    # What may run as one batch has one shape and, once types have schedules of their own, one type.
    for index in sorted(owned, key=lambda index: (matrices[index].shape, types[index])):
        size = matrices[index].num_elements
        if size > room:
            tasks.append(())
            room = most_elements
        tasks[-1] += (index,)
        room -= size
    return tasks
