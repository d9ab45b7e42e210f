"""The structure that all ranks agree on before the first step: groups of ranks, all matrices."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch.distributed as dist

from amo_dist.distributed.agreement import (
    RankMismatchError,
    check_alike,
    check_alike_by_ranks,
    gather_json,
)
from amo_dist.distributed.groups import Membership, this_rank
from amo_dist.engine.parameters import Parameters
from amo_dist.schedule.types import MatrixInfo

Listed: TypeAlias = tuple[Sequence[int], Sequence[Sequence[Any]]]
"""A parameter as ranks exchange it: its ranks, and the fields of its matrices."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class World:
    """The agreed structure.

    Attributes:
        group: Process group, or None on a single rank.
        rank: Rank of this process in the job.
        registry: Every matrix of the world, sorted by name.
        reporting_ranks: Ranks whose observation of a matrix counts, by its name: the first that
            list it. Plain tensors that are private to each rank share names.
        ranks: All ranks, in the order of the group.
        rank_sets: Sets of ranks that share parameters, sorted.
        groups_by_ranks: Process group of each set of ranks that shares parameters with this one.
        shares_all: Whether every rank shares every parameter, as under DDP and FSDP; False on a
            single process.
    """

    group: dist.ProcessGroup | None
    rank: int
    registry: tuple[MatrixInfo, ...]
    reporting_ranks: Mapping[str, tuple[int, ...]]
    ranks: tuple[int, ...]
    rank_sets: tuple[tuple[int, ...], ...]
    groups_by_ranks: Mapping[tuple[int, ...], dist.ProcessGroup | None]
    shares_all: bool

    @property
    def leads(self) -> bool:
        """Whether this is the first rank of the world: it plans for all, and reports."""
        return self.group is None or dist.get_rank(self.group) == 0


def agree_on_world(
    parameters: Parameters,
    update_scales: Sequence[float],
    hyperparameters: Sequence[str],
    configuration: Mapping[str, Any],
    membership: Membership,
    group: dist.ProcessGroup | None,
) -> World:
    """Compare the structure of all ranks; a collective over the world.

    Args:
        parameters: Parameters of this process.
        update_scales: Factor on the update of each matrix beside the learning rate.
        hyperparameters: Hyperparameters of each parameter group, as text.
        configuration: JSON values that must be alike on all ranks.
        membership: Membership of this process.
        group: Process group of the world, as ``membership`` returned it.

    Raises:
        RankMismatchError: On every rank; names the rank and the parameter or field that differs.
    """
    lines = [f"{key} = {json.dumps(value)}" for key, value in sorted(configuration.items())]
    check_alike("configuration", "\n".join(lines), group)
    infos: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
    for matrix, *fields in zip(
        parameters.matrices, parameters.operator_types, update_scales, strict=True
    ):
        infos[matrix.param].append((matrix.name, matrix.shape, *fields))
    listed: list[Listed] = []
    lines_by_ranks: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for index, param in enumerate(parameters.params):
        ranks = param.layout.ranks
        listed.append((ranks, infos[index]))
        structure = f"{param.tensor.dtype}, {param.layout.key}, {infos[index] or 'adamw'}"
        line = f"{param.name}: {structure}, {hyperparameters[param.group]}"
        lines_by_ranks[ranks].append(line)
    text_by_ranks = {ranks: "\n".join(lines) for ranks, lines in lines_by_ranks.items()}
    check_alike_by_ranks("parameters", text_by_ranks, group)
    by_rank = gather_json(listed, group)
    registry, reporting_ranks, sets = _survey(by_rank)
    wanted = (tuple(sorted(param.layout.ranks)) for param in parameters.params)
    return World(
        group=group,
        rank=this_rank(),
        registry=registry,
        reporting_ranks=reporting_ranks,
        ranks=(this_rank(),) if group is None else tuple(dist.get_process_group_ranks(group)),
        rank_sets=tuple(sorted(sets - {()})),
        groups_by_ranks=membership.groups(wanted, group),
        shares_all=all(len(ranks) == len(by_rank) for ranks in sets),
    )


def sharing_ranks(ranks: Sequence[int]) -> tuple[int, ...]:
    """Ranks that share a parameter; none if it is private to one rank."""
    return tuple(ranks) if len(ranks) > 1 else ()


def _survey(
    by_rank: Sequence[Sequence[Listed]],
) -> tuple[tuple[MatrixInfo, ...], dict[str, tuple[int, ...]], set[tuple[int, ...]]]:
    """Registry, reporting ranks, and sets of sharing ranks, from the parameters of every rank."""
    registry: dict[str, MatrixInfo] = {}
    reporting_ranks: dict[str, tuple[int, ...]] = {}
    sets: set[tuple[int, ...]] = set()
    # Equal lists are one object: a thousand ranks have few different ones.
    for listed in {id(listed): listed for listed in by_rank}.values():
        for ranks, matrices in listed:
            sets.add(sharing_ranks(ranks))
            for name, (m, n), *fields in matrices:
                info = MatrixInfo(name, (m, n), *fields)
                first_ranks = reporting_ranks.setdefault(name, tuple(ranks))
                expected = registry.setdefault(name, info)
                if info != expected:
                    raise RankMismatchError(
                        f"{name}: rank {first_ranks[0]} has {expected}; rank {ranks[0]} has {info}"
                    )
    return tuple(registry[name] for name in sorted(registry)), reporting_ranks, sets
