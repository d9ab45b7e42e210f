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
from amo_dist.engine.parameters import Entry, Parameters
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
        slots: Name and ranks of every parameter of the world, sorted: what the per-step agreement
            compares. Private tensors of one name share a slot, with no ranks.
        groups_by_ranks: Process group of each set of ranks that shares parameters here.
        shares_all: Whether every rank holds a part of every parameter, as under DDP and FSDP.
    """

    group: dist.ProcessGroup | None
    rank: int
    registry: tuple[MatrixInfo, ...]
    homes: Mapping[str, tuple[int, ...]]
    slots: tuple[tuple[str, tuple[int, ...]], ...]
    groups_by_ranks: Mapping[tuple[int, ...], dist.ProcessGroup | None]
    shares_all: bool


def agree_on_world(
    parameters: Parameters,
    hyperparameters: Sequence[str],
    configuration: Mapping[str, Any],
    process_group: dist.ProcessGroup | None,
) -> World:
    """Compare the structure of all ranks; a collective over the world.

    Args:
        parameters: Of this process.
        hyperparameters: Of each parameter group, as text.
        configuration: JSON values that must be alike on all ranks.
        process_group: Group over which plain tensors are replicated, if any.

    Raises:
        RankMismatchError: On every rank; names the rank and the parameter or field that differs.
    """
    group = world_group()
    lines = [f"{key} = {json.dumps(value)}" for key, value in sorted(configuration.items())]
    check_alike("configuration", "\n".join(lines), group)
    mine = [
        {**entry.describe(), "hyperparameters": hyperparameters[entry.group]}
        for entry in parameters.entries
    ]
    by_rank = gather_json(mine, group)
    _check_shared(by_rank)
    return World(
        group=group,
        rank=dist.get_rank() if group is not None else 0,
        registry=_registry(by_rank),
        homes=_homes(by_rank),
        slots=tuple(
            sorted(
                {
                    slot_of(entry["name"], entry["ranks"])
                    for _, entries in _distinct(by_rank)
                    for entry in entries
                }
            )
        ),
        groups_by_ranks=_groups(parameters.entries, process_group),
        shares_all=all(
            len(entry["ranks"]) == len(by_rank)
            for _, entries in _distinct(by_rank)
            for entry in entries
        ),
    )


def slot_of(name: str, ranks: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """The slot of a parameter in `World.slots`, by its name and the ranks that share it."""
    return name, tuple(ranks) if len(ranks) > 1 else ()


def _distinct(
    by_rank: Sequence[Sequence[Mapping[str, Any]]],
) -> list[tuple[int, Sequence[Mapping[str, Any]]]]:
    """Each list once, beside the first rank that has it: of a thousand ranks few differ."""
    first = {id(entries): rank for rank, entries in reversed(list(enumerate(by_rank)))}
    return [(rank, by_rank[rank]) for rank in sorted(first.values())]


def _check_shared(by_rank: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Ranks that share parameters must list the same ones, in the same order."""
    shared = {tuple(entry["ranks"]) for _, entries in _distinct(by_rank) for entry in entries}
    for ranks in sorted(shared):
        first = _shared_by(ranks, by_rank[ranks[0]])
        for rank in ranks[1:]:
            if by_rank[rank] is not by_rank[ranks[0]]:
                other = _shared_by(ranks, by_rank[rank])
                if other != first:
                    raise RankMismatchError(_difference(ranks[0], first, rank, other))


def _shared_by(
    ranks: tuple[int, ...], entries: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    return [entry for entry in entries if tuple(entry["ranks"]) == ranks]


def _difference(
    first_rank: int,
    first: Sequence[Mapping[str, Any]],
    rank: int,
    other: Sequence[Mapping[str, Any]],
) -> str:
    """What differs between the parameters that two ranks share: one missing, or the first pair."""
    names, others = ([entry["name"] for entry in entries] for entries in (first, other))
    missing = [name for name in names if name not in others]
    surplus = [name for name in others if name not in names]
    told = [
        f"rank {holder} has {lacking[0]} (and {len(lacking) - 1} more), rank {loser} has not"
        for holder, loser, lacking in ((first_rank, rank, missing), (rank, first_rank, surplus))
        if lacking
    ]
    if not told:
        number = next(i for i, (a, b) in enumerate(zip(first, other, strict=True)) if a != b)
        found, expected = _show(other[number]), _show(first[number])
        told = [f"number {number} is {expected} on rank {first_rank}, {found} on rank {rank}"]
    return f"parameters differ between ranks that share them: {'; '.join(told)}"


def _show(entry: Mapping[str, Any]) -> str:
    types = ", ".join(operator_type for _, _, operator_type in entry["matrices"]) or "adamw"
    told = (types, entry["dtype"], entry["layout"], entry["hyperparameters"])
    return f"{entry['name']} ({', '.join(map(str, told))})"


def _registry(by_rank: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[MatrixInfo, ...]:
    found: dict[str, tuple[int, MatrixInfo]] = {}
    for rank, entries in _distinct(by_rank):
        for entry in entries:
            for name, shape, operator_type in entry["matrices"]:
                info = MatrixInfo(name, (shape[0], shape[1]), operator_type)
                earlier, expected = found.setdefault(name, (rank, info))
                if info != expected:
                    raise RankMismatchError(
                        f"{name}: rank {earlier} has {expected}; rank {rank} has {info}"
                    )
    return tuple(found[name][1] for name in sorted(found))


def _homes(by_rank: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, tuple[int, ...]]:
    homes: dict[str, tuple[int, ...]] = {}
    for _, entries in _distinct(by_rank):
        for entry in entries:
            for name, _, _ in entry["matrices"]:
                homes.setdefault(name, tuple(entry["ranks"]))
    return homes


def _groups(
    entries: Sequence[Entry], process_group: dist.ProcessGroup | None
) -> dict[tuple[int, ...], dist.ProcessGroup | None]:
    """Process group of each set of ranks; a collective over the world."""
    known: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for entry in entries:
        if isinstance(entry.param, DTensor) and entry.param.device_mesh.ndim == 1:
            group = entry.param.device_mesh.get_group()
            known.setdefault(_members(group), group)
    if process_group is not None:
        # Behind the meshes, which all of their ranks know, while one rank may pass a group alone.
        known.setdefault(_members(process_group), process_group)
    world = world_group()
    if world is not None:
        known[_members(world)] = world
    wanted = sorted({tuple(sorted(entry.layout.ranks)) for entry in entries})
    known.update(_new_groups([r for r in wanted if len(r) > 1 and r not in known], world))
    return {ranks: known[ranks] if len(ranks) > 1 else None for ranks in wanted}


def _new_groups(
    missing: Sequence[tuple[int, ...]], world: dist.ProcessGroup | None
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """A new group for each set of ranks that any rank misses; a collective over the world.

    All ranks make all of them, although PyTorch can make one by its members alone: it then names
    it after the number of groups that each member has, and where those differ the members wait
    for one another for good. Nor can NCCL then split it off a communicator of the world.
    """
    everywhere = sorted({tuple(ranks) for found in gather_json(missing, world) for ranks in found})
    made = {ranks: dist.new_group(list(ranks)) for ranks in everywhere}
    return {ranks: group for ranks, group in made.items() if dist.get_rank() in ranks}


def _members(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(sorted(dist.get_process_group_ranks(group)))
