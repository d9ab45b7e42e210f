"""What the ranks of the world agree on before the first step: structure, groups, registry."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from amo_dist.distributed.agreement import (
    RankMismatchError,
    check_alike,
    gather_json,
    world_group,
)
from amo_dist.parameters import Entry, Parameters
from amo_dist.schedule.types import MatrixInfo


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class World:
    """The agreed structure.

    Attributes:
        group: Default process group, or None on a single process.
        rank: This process.
        registry: Every matrix of the world, sorted by name.
        homes: By matrix name, the ranks that report its observation: the first that list it.
            Where plain tensors are private to each rank, many hold a matrix of one name.
        names: Every parameter of the world, sorted: the slots of the per-step agreement.
        groups_by_ranks: Process group of each set of ranks that shares parameters here.
    """

    group: dist.ProcessGroup | None
    rank: int
    registry: tuple[MatrixInfo, ...]
    homes: Mapping[str, tuple[int, ...]]
    names: tuple[str, ...]
    groups_by_ranks: Mapping[tuple[int, ...], dist.ProcessGroup | None]


def agree_on_world(
    parameters: Parameters,
    configuration: Mapping[str, Any],
    process_group: dist.ProcessGroup | None,
) -> World:
    """Compare the structure of all ranks; a collective over the world.

    Args:
        parameters: Of this process.
        configuration: JSON values that must be alike on all ranks.
        process_group: Group over which plain tensors are replicated, if any.

    Raises:
        RankMismatchError: On every rank; names the rank and the parameter or field that differs.
    """
    group = world_group()
    lines = [f"{key} = {json.dumps(value)}" for key, value in sorted(configuration.items())]
    check_alike("configuration", "\n".join(lines), group)
    mine = [entry.describe() for entry in parameters.entries]
    by_rank = gather_json(mine, group)
    _check_shared(by_rank)
    return World(
        group=group,
        rank=dist.get_rank() if group is not None else 0,
        registry=_registry(by_rank),
        homes=_homes(by_rank),
        names=tuple(sorted({entry["name"] for entries in by_rank for entry in entries})),
        groups_by_ranks=_groups(parameters.entries, process_group),
    )


def _check_shared(by_rank: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Ranks that share parameters must list the same ones, in the same order."""
    shared = {tuple(entry["ranks"]) for entries in by_rank for entry in entries}
    for ranks in sorted(shared):
        lists = {
            rank: [entry for entry in by_rank[rank] if tuple(entry["ranks"]) == ranks]
            for rank in ranks
        }
        first = lists[ranks[0]]
        for rank in ranks[1:]:
            if lists[rank] != first:
                raise RankMismatchError(_difference(ranks[0], first, rank, lists[rank]))


def _difference(
    first_rank: int,
    first: Sequence[Mapping[str, Any]],
    rank: int,
    other: Sequence[Mapping[str, Any]],
) -> str:
    for number in range(max(len(first), len(other))):
        left = first[number] if number < len(first) else None
        right = other[number] if number < len(other) else None
        if left != right:
            return (
                f"parameters: number {number} differs between ranks that share it: rank "
                f"{first_rank} has {_show(left)}; rank {rank} has {_show(right)}"
            )
    raise AssertionError("called for equal lists")


def _show(entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return "none"
    types = ", ".join(operator_type for _, _, operator_type in entry["matrices"]) or "adamw"
    return f"{entry['name']} ({types}, {entry['dtype']}, {entry['layout']})"


def _registry(by_rank: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[MatrixInfo, ...]:
    found: dict[str, MatrixInfo] = {}
    for rank, entries in enumerate(by_rank):
        for entry in entries:
            for name, shape, operator_type in entry["matrices"]:
                info = MatrixInfo(name, (shape[0], shape[1]), operator_type)
                if found.setdefault(name, info) != info:
                    raise RankMismatchError(
                        f"{name}: rank {rank} has {info}, an earlier rank has {found[name]}"
                    )
    return tuple(found[name] for name in sorted(found))


def _homes(by_rank: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, tuple[int, ...]]:
    homes: dict[str, tuple[int, ...]] = {}
    for entries in by_rank:
        for entry in entries:
            for name, _, _ in entry["matrices"]:
                homes.setdefault(name, tuple(entry["ranks"]))
    return homes


def _groups(
    entries: Sequence[Entry], process_group: dist.ProcessGroup | None
) -> dict[tuple[int, ...], dist.ProcessGroup | None]:
    """Process group of each set of ranks; new ones are made in an order that all ranks share."""
    known: dict[tuple[int, ...], dist.ProcessGroup] = {}
    if process_group is not None:
        known[_members(process_group)] = process_group
    for entry in entries:
        if isinstance(entry.param, DTensor) and entry.param.device_mesh.ndim == 1:
            group = entry.param.device_mesh.get_group()
            known.setdefault(_members(group), group)
    world = world_group()
    if world is not None:
        known[_members(world)] = world
    groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    for ranks in sorted({tuple(sorted(entry.layout.ranks)) for entry in entries}):
        if len(ranks) == 1:
            groups[ranks] = None
        else:
            groups[ranks] = known.get(ranks) or dist.new_group(
                list(ranks), use_local_synchronization=True
            )
    return groups


def _members(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(sorted(dist.get_process_group_ranks(group)))
