"""What the ranks of the world agree on before the first step: structure, groups, registry."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch.distributed as dist

from amo_dist.distributed.agreement import (
    RankMismatchError,
    check_alike,
    check_alike_by_ranks,
    gather_json,
    gather_text,
)
from amo_dist.distributed.groups import Membership, this_rank
from amo_dist.distributed.team_groups import TeamGroup
from amo_dist.engine.parameters import Parameters
from amo_dist.schedule.types import MatrixInfo

Slot: TypeAlias = tuple[str, tuple[int, ...]]
Matrix: TypeAlias = tuple[str, tuple[int, int], str]
"""Name, shape and operator type."""
Listed: TypeAlias = tuple[str, Sequence[int], Sequence[Matrix]]
"""A parameter as ranks tell each other of it: its name, its ranks and its matrices."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class World:
    """The agreed structure.

    Attributes:
        group: Its process group, or None on a single rank.
        rank: This process, in the job.
        registry: Every matrix of the world, sorted by name.
        homes: By matrix name, the ranks that report its observation: the first that list it.
            Where plain tensors are private to each rank, many hold a matrix of one name.
        slots: Name and ranks of every parameter of the world, sorted: what the per-step agreement
            compares. Private tensors of one name share a slot, with no ranks.
        groups_by_ranks: Process group of each set of ranks that shares parameters here.
        node_by_rank: Of each rank, a number that ranks of its node share.
        shares_all: Whether every rank shares every parameter, as under DDP and FSDP; False on a
            single process.
        teams: Of this rank, by their ranks; planning adds what it needs.
    """

    group: dist.ProcessGroup | None
    rank: int
    registry: tuple[MatrixInfo, ...]
    homes: Mapping[str, tuple[int, ...]]
    slots: tuple[Slot, ...]
    groups_by_ranks: Mapping[tuple[int, ...], dist.ProcessGroup | None]
    node_by_rank: Mapping[int, int]
    shares_all: bool
    teams: dict[tuple[int, ...], TeamGroup] = dataclasses.field(default_factory=dict)

    @property
    def leads(self) -> bool:
        """Whether this is the first rank of the world: it plans for all, and reports."""
        return self.group is None or dist.get_rank(self.group) == 0


def agree_on_world(
    parameters: Parameters,
    hyperparameters: Sequence[str],
    configuration: Mapping[str, Any],
    membership: Membership,
    group: dist.ProcessGroup | None,
) -> World:
    """Compare the structure of all ranks; a collective over the world.

    Args:
        parameters: Of this process.
        hyperparameters: Of each parameter group, as text.
        configuration: JSON values that must be alike on all ranks.
        membership: Of this process.
        group: The world's, as ``membership`` gave it.

    Raises:
        RankMismatchError: On every rank; names the rank and the parameter or field that differs.
    """
    lines = [f"{key} = {json.dumps(value)}" for key, value in sorted(configuration.items())]
    check_alike("configuration", "\n".join(lines), group)
    matrices: dict[int, list[Matrix]] = defaultdict(list)
    for matrix, operator_type in zip(parameters.matrices, parameters.operator_types, strict=True):
        matrices[matrix.tensor].append((matrix.name, matrix.shape, operator_type))
    listed: list[Listed] = []
    lines_by_ranks: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for index, entry in enumerate(parameters.entries):
        listed.append((entry.name, entry.layout.ranks, matrices[index]))
        told = f"{entry.param.dtype}, {entry.layout.key}, {matrices[index] or 'adamw'}"
        line = f"{entry.name}: {told}, {hyperparameters[entry.group]}"
        lines_by_ranks[entry.layout.ranks].append(line)
    text_by_ranks = {ranks: "\n".join(found) for ranks, found in lines_by_ranks.items()}
    check_alike_by_ranks("parameters", text_by_ranks, group)
    by_rank = gather_json(listed, group)
    registry, homes, slots = _survey(by_rank)
    return World(
        group=group,
        rank=this_rank(),
        registry=registry,
        homes=homes,
        slots=slots,
        groups_by_ranks=membership.groups(
            (tuple(sorted(entry.layout.ranks)) for entry in parameters.entries), group
        ),
        node_by_rank=_nodes(group),
        shares_all=all(len(ranks) == len(by_rank) for _, ranks in slots),
    )


def slot_of(name: str, ranks: Sequence[int]) -> Slot:
    """The slot of a parameter in `World.slots`, by its name and the ranks that share it."""
    return name, tuple(ranks) if len(ranks) > 1 else ()


def _survey(
    by_rank: Sequence[Sequence[Listed]],
) -> tuple[tuple[MatrixInfo, ...], dict[str, tuple[int, ...]], tuple[Slot, ...]]:
    """Registry, homes and slots, from the parameters of every rank."""
    registry: dict[str, MatrixInfo] = {}
    homes: dict[str, tuple[int, ...]] = {}
    slots: set[Slot] = set()
    # Each list once: of a thousand ranks few differ.
    for listed in {id(listed): listed for listed in by_rank}.values():
        for parameter, ranks, matrices in listed:
            slots.add(slot_of(parameter, ranks))
            for name, (m, n), operator_type in matrices:
                info = MatrixInfo(name, (m, n), operator_type)
                home = homes.setdefault(name, tuple(ranks))
                expected = registry.setdefault(name, info)
                if info != expected:
                    raise RankMismatchError(
                        f"{name}: rank {home[0]} has {expected}; rank {ranks[0]} has {info}"
                    )
    return tuple(registry[name] for name in sorted(registry)), homes, tuple(sorted(slots))


def _nodes(group: dist.ProcessGroup | None) -> dict[int, int]:
    """By rank the first rank of its node; a collective over the world.

    torchrun numbers the nodes, and several of them may run on one host, as in tests.
    """
    where = gather_text(f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}", group)
    ranks = [this_rank()] if group is None else dist.get_process_group_ranks(group)
    first = dict(zip(reversed(where), reversed(ranks), strict=True))
    return {rank: first[node] for rank, node in zip(ranks, where, strict=True)}
