"""The structure that all ranks agree on before the first step: groups of ranks, all matrices."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch.distributed as dist

from amo_dist.distributed.layout import Matrix, TensorLayout
from amo_dist.distributed.plan import copies_of
from amo_dist.distributed.ranks import (
    Membership,
    RankMismatchError,
    Ranks,
    fingerprint56,
    gather_json,
    members,
    raise_if_unlike,
    this_rank,
)
from amo_dist.engine.parameters import Param, Parameters
from amo_dist.schedule.types import MatrixInfo

# Matrices as ranks exchange them: the ranks that hold them, and the fields of each.
Listed: TypeAlias = tuple[Sequence[int], Sequence[Sequence[Any]]]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class World:
    """The agreed structure.

    Attributes:
        group: Process group, or None on a single rank.
        rank: Rank of this process in the job.
        registry: Every matrix of the world, sorted by name.
        ranks: All ranks, in the order of the group.
        gradient_ranks: Ranks that must have a gradient alike, for each parameter of this process;
            this rank alone for one that others need not have.
        rank_sets: All sets of several such ranks in the world, sorted.
        replica_ranks: Ranks that hold the same elements as this one, for each parameter.
        replica_sets: All sets of several such ranks in the world, sorted.
        names_by_ranks: Names of the matrices that this process shares with each set of ranks.
        groups_by_ranks: Process group of each of these sets, and of the ranks of each that hold the
            same shards as this one.
        speaks: Whether this rank logs what all have agreed on.
        shares_all: Whether every rank shares every parameter, as under DDP and FSDP; False on a
            single process.
    """

    group: dist.ProcessGroup | None
    rank: int
    registry: tuple[MatrixInfo, ...]
    ranks: tuple[int, ...]
    gradient_ranks: tuple[Ranks, ...]
    rank_sets: tuple[Ranks, ...]
    replica_ranks: tuple[Ranks, ...]
    replica_sets: tuple[Ranks, ...]
    names_by_ranks: Mapping[Ranks, Sequence[str]]
    groups_by_ranks: Mapping[Ranks, dist.ProcessGroup | None]
    speaks: bool
    shares_all: bool


def gather_world(
    parameters: Parameters,
    rates: Sequence[float],
    hyperparameters: Sequence[str],
    membership: Membership,
    group: dist.ProcessGroup | None,
) -> World:
    """Compare the structure of all ranks; a collective over the world.

    Args:
        parameters: Parameters of this process.
        rates: Factor on the update of each matrix beside the learning rate.
        hyperparameters: Hyperparameters of each parameter group, as text.
        membership: Membership of this process.
        group: Process group of the world, as ``membership`` returned it.

    Raises:
        RankMismatchError: On every rank; names the rank and the parameter or field that differs.
    """
    rows = zip(parameters.matrices, parameters.operator_types, rates, strict=True)
    lines: dict[Ranks, list[str]] = defaultdict(list)
    # Ranks are listed once for all parameters on them: the text would be mostly ranks otherwise.
    listed_by_ranks: dict[Ranks, list[tuple[Any, ...]]] = defaultdict(list)
    names_by_ranks: dict[Ranks, list[str]] = defaultdict(list)
    gradient_ranks = []
    for param in parameters.params:
        own = list(itertools.islice(rows, len(param.views)))
        matrices, listed = (
            [row[0] for row in own],
            [(m.name, m.shape, *fields) for m, *fields in own],
        )
        cuts = f"cut by {fingerprint56(str(param.views))}" if param.views else "adamw"
        structure = f"{param.tensor.dtype}, {param.layout.key}, {listed} {cuts}"
        line = f"{param.name}: {structure}, {hyperparameters[param.group]}"
        lines[param.layout.ranks].append(line)
        listed_by_ranks[param.layout.ranks] += listed
        if matrices:
            names_by_ranks[tuple(sorted(param.layout.ranks))] += [m.name for m in matrices]
        gradient_ranks.append(_ranks_with_gradients(param, matrices))
    values = {
        "texts": [(ranks, "\n".join(alike)) for ranks, alike in lines.items()],
        "sets": sorted({ranks for ranks in gradient_ranks if len(ranks) > 1}),
        "matrices": [*listed_by_ranks.items()],
    }
    by_rank = gather_json(values, group)
    raise_if_unlike("parameters", {rank: gathered["texts"] for rank, gathered in by_rank.items()})
    # Equal values are one object: a thousand ranks have few different ones.
    distinct = [*{id(gathered): gathered for gathered in by_rank.values()}.values()]
    layouts = (param.layout for param in parameters.params)
    replica_ranks = [_ranks_with_same_elements(layout, this_rank()) for layout in layouts]
    own_sets = sorted({ranks for ranks in replica_ranks if len(ranks) > 1})
    # Apart from the texts above, which would differ by shard.
    replica_sets = itertools.chain(*gather_json(own_sets, group).values())
    # Matrices of one layout share their replicas: tens of thousands have few.
    replicas = {id(matrix.replicas): matrix.replicas for matrix in parameters.matrices}
    along = {tuple(sorted(copies_of(own, this_rank()))) for own in replicas.values()}
    num_holders = {len(ranks) for gathered in distinct for ranks, _ in gathered["texts"]}
    return World(
        group=group,
        rank=this_rank(),
        registry=registry_of(gathered["matrices"] for gathered in distinct),
        ranks=members(group),
        gradient_ranks=tuple(gradient_ranks),
        rank_sets=tuple(sorted({tuple(r) for gathered in distinct for r in gathered["sets"]})),
        replica_ranks=tuple(replica_ranks),
        replica_sets=tuple(sorted(set(map(tuple, replica_sets)))),
        names_by_ranks=names_by_ranks,
        groups_by_ranks=membership.groups({*names_by_ranks, *along}, group),
        speaks=this_rank() == members(group)[0],
        shares_all=len(by_rank) > 1 and num_holders == {len(by_rank)},
    )


def _ranks_with_gradients(param: Param, matrices: Sequence[Matrix]) -> Ranks:
    """Ranks that must have a gradient of a parameter, with these matrices, if this rank has one.

    These are all that hold the parameter. But a stack of experts, each whole on its rank, is not
    gathered: ranks whose experts saw no token may lack its gradient.
    """
    rank = this_rank()
    if not param.views or param.tensor.dim() != 3:
        return param.layout.ranks
    if any(m.num_held(r) < m.num_elements for m in matrices for r in m.regions_by_rank):
        return param.layout.ranks
    holders = {tuple(sorted(m.regions_by_rank)) for m in matrices if rank in m.regions_by_rank}
    return holders.pop() if len(holders) == 1 else (rank,)


@functools.lru_cache(maxsize=4096)
def _ranks_with_same_elements(layout: TensorLayout, rank: int) -> Ranks:
    """Ranks that hold the same elements of a tensor as one of them; none if that holds none."""
    own = layout.intervals_by_rank[rank]
    alike = sorted(other for other, held in layout.intervals_by_rank.items() if held == own)
    return tuple(alike) if all(own) else ()


def registry_of(by_rank: Iterable[Sequence[Listed]]) -> tuple[MatrixInfo, ...]:
    """Every matrix of the world, sorted by name; plain tensors on several ranks may share one.

    Args:
        by_rank: All matrices of each rank.

    Raises:
        RankMismatchError: One name stands for two matrices.
    """
    registry: dict[str, tuple[int, MatrixInfo]] = {}
    for ranks, matrices in itertools.chain.from_iterable(by_rank):
        for name, (m, n), *fields in matrices:
            info = MatrixInfo(name, (m, n), *fields)
            first, expected = registry.setdefault(name, (ranks[0], info))
            if info is not expected and info != expected:
                raise RankMismatchError(
                    f"{name}: rank {first} has {expected}; rank {ranks[0]} has {info}"
                )
    return tuple(registry[name][1] for name in sorted(registry))
