"""Which ranks an optimizer runs on, and the process groups of sets of them."""

from __future__ import annotations

import contextlib
import datetime
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from amo_dist.distributed.agreement import (
    RankMismatchError,
    control_device,
    gather_json,
    max_over,
    text_mark,
)

logger = logging.getLogger(__name__)

Ranks: TypeAlias = tuple[int, ...]
"""Global ranks, sorted."""
Given: TypeAlias = "dist.ProcessGroup | DeviceMesh | None"
"""What a user may pass as ``process_group``."""

_PATIENCE = 60.0
"""Seconds until a rank says for whom it waits."""

_made: dict[Ranks, dist.ProcessGroup] = {}
"""Groups that their members have made alone; optimizers over the same ranks share them."""


def replica_ranks(given: Given) -> list[int]:
    """Global ranks over which plain tensors are replicas: this one alone where nothing is given.

    Raises:
        ValueError: Neither a mesh nor a process group that this rank is in.
    """
    if isinstance(given, DeviceMesh):
        return [int(rank) for rank in given.mesh.flatten().tolist()]
    if given is None:
        return [this_rank()]
    if not isinstance(given, dist.ProcessGroup):
        raise ValueError(
            f"process_group: found {given!r} on rank {this_rank()}, expected a process group with "
            "this rank in it, or a mesh"
        )
    return dist.get_process_group_ranks(given)


class Kept:
    """What was given, for a copy: PyTorch copies no process group.

    A deep copy has the same one; one that was pickled has a group of the same ranks, if it is read
    by a rank of a job.

    Args:
        given: As for `Membership`.
        ranks: Of the world.

    Raises:
        ValueError: When pickled ones are read: the job has no such group on this rank.
    """

    def __init__(self, given: Given, ranks: Ranks) -> None:
        self.given, self._ranks = given, ranks

    def __deepcopy__(self, memo: object) -> Kept:
        return self

    def __reduce__(self) -> tuple[Callable[..., Kept], tuple[object, ...]]:
        return Kept._read, (self.given is None, self._ranks)

    @staticmethod
    def _read(is_default: bool, ranks: Ranks) -> Kept:
        if is_default or not _is_distributed():
            return Kept(None, ranks)
        for group in dist.distributed_c10d._world.pg_map:
            if _members(group) == ranks:
                return Kept(group, ranks)
        raise ValueError(
            f"process_group: found none of ranks {ranks} on rank {this_rank()}, expected one, as "
            "the optimizer had that was pickled"
        )


class Membership:
    """The ranks of an optimizer's world, and the process groups that are there already.

    A mesh stands for the ranks of the mesh that it is a slice of: stages of a pipeline, each on its
    slice, are one world.

    Args:
        tensors: The parameters.
        given: ``process_group`` of `Muon`.

    Attributes:
        ranks: A process group that is given; else the ranks of the meshes, of DTensors or given;
            else of the job.

    Raises:
        ValueError: A rank of a DTensor's mesh is not in the process group that is given.
    """

    def __init__(self, tensors: Iterable[Tensor], given: Given) -> None:
        meshes = {each.device_mesh: None for each in tensors if isinstance(each, DTensor)}
        if isinstance(given, DeviceMesh):
            meshes[given] = None
        # PyTorch has no public name for it.
        roots = {mesh._get_root_mesh(): None for mesh in meshes}
        self._group = given if isinstance(given, dist.ProcessGroup) else None
        self._meshes, self._ranks_by_root = (*meshes, *roots), {r: _ranks_of(r) for r in roots}
        if self._group is not None:
            self.ranks = _members(self._group)
            for ranks in map(_ranks_of, meshes):
                if not set(ranks) <= set(self.ranks):
                    raise ValueError(
                        f"process_group: found ranks {self.ranks}, expected all of {ranks}, the "
                        "ranks of a parameter's mesh"
                    )
        elif roots:
            self.ranks = tuple(sorted(set().union(*self._ranks_by_root.values())))
        else:
            self.ranks = tuple(range(_num_ranks()))

    def join(self) -> dist.ProcessGroup | None:
        """The process group of the world, None on a single rank; a collective over these ranks.

        Raises:
            RankMismatchError: On every rank, where ranks that share a mesh have different worlds.
            ValueError: On every rank: there is no such group, and these ranks cannot make one.
        """
        if len(self.ranks) == 1:
            return None
        if self._group is not None:
            return dist.group.WORLD if _is_whole(self.ranks) else self._group
        num_groups, known = self._compare(), self._known()
        return known.get(self.ranks) or _make_alone(self.ranks, num_groups)

    def groups(
        self, wanted: Iterable[Ranks], world: dist.ProcessGroup | None
    ) -> dict[Ranks, dist.ProcessGroup | None]:
        """Process group of each set of ranks, None of a single rank; a collective over the world.

        All ranks make all groups that any of them misses. Where the world is the whole job they do
        so as PyTorch wants it: NCCL can then split each off a communicator of the job.

        Args:
            wanted: Sets with this rank in them.
            world: What `join` returned.
        """
        wanted = sorted(set(wanted))
        known = self._known() if world is not None else {}
        missing = [ranks for ranks in wanted if len(ranks) > 1 and ranks not in known]
        of_all = sorted({tuple(ranks) for some in gather_json(missing, world) for ranks in some})
        is_whole = _is_whole(self.ranks)
        num_groups = 0 if is_whole or not of_all else _most_groups([world])
        for ranks in of_all:
            is_member = this_rank() in ranks
            if is_whole:
                made = dist.new_group(list(ranks), timeout=_timeout())
            else:
                # The others make one of their own, so that each goes on with as many.
                made = _make_alone(ranks if is_member else (this_rank(),), num_groups)
                num_groups += 1
            if is_member:
                known[ranks] = made
        return {ranks: known[ranks] if len(ranks) > 1 else None for ranks in wanted}

    @contextlib.contextmanager
    def patience(self) -> Iterator[None]:
        """Log once for whom this rank waits, if the body takes long."""
        text = (
            "rank %d has waited %g s for ranks %s, the world of its optimizer, to take their first "
            "step or to load a state; where others train than these, pass process_group to it"
        )
        told = (text, this_rank(), _PATIENCE, list(self.ranks))
        timer = threading.Timer(_PATIENCE, logger.warning, told)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _known(self) -> dict[Ranks, dist.ProcessGroup]:
        """The groups that are there, by their ranks."""
        meshes = (mesh.get_group() for mesh in self._meshes if mesh.ndim == 1)
        # Before the meshes, which all of their ranks know, while one rank may pass a group alone.
        found = [self._group, *_made.values(), *meshes, dist.group.WORLD]
        return {_members(group): group for group in found if _is_alive(group)}

    def _compare(self) -> int:
        """Compare worlds over the meshes that are not the whole job; the most groups of any rank.

        Each mesh has a group for each of its axes. All ranks go through their meshes in the same
        order, and none raises before it has told all of them.
        """
        small = [root for root, ranks in self._ranks_by_root.items() if not _is_whole(ranks)]
        small.sort(key=self._ranks_by_root.__getitem__)
        groups = [
            mesh.get_group(axis)
            for mesh in small
            for axis in range(mesh.ndim)
            if mesh.size(axis) > 1
        ]
        mark = text_mark(str(self.ranks))
        found, negated, num_groups = _most([mark, -mark, _num_groups()], groups)
        if found != -negated:
            raise RankMismatchError(
                f"the world of an optimizer: this rank has {list(self.ranks)}, the ranks of its "
                "parameters' meshes, and a rank that shares a mesh has others; pass process_group, "
                "a group of all these ranks, to the optimizers of all of them"
            )
        return num_groups


def _make_alone(ranks: Ranks, num_groups: int) -> dist.ProcessGroup:
    """Make a group by its members alone; the rest of the job takes no part.

    PyTorch names such a group after its ranks and the number of groups that a member has; where
    those differ the members wait for one another for good.

    Args:
        ranks: Of the group.
        num_groups: At least as many as any member has, the same on all.

    Raises:
        ValueError: On every rank, where PyTorch splits each group off the communicator of the job.
    """
    assert dist.group.WORLD is not None
    if dist.group.WORLD.bound_device_id is not None:
        raise ValueError(
            f"process_group: found none of ranks {ranks}, expected one: init_process_group was "
            "given a device_id, so that all ranks of the job must make it: "
            f"dist.new_group({list(ranks)})"
        )
    while _num_groups() < num_groups:
        dist.new_group([this_rank()], use_local_synchronization=True)
    _made[ranks] = dist.new_group(list(ranks), timeout=_timeout(), use_local_synchronization=True)
    return _made[ranks]


def _timeout() -> datetime.timedelta | None:
    """That of the job's group: PyTorch gives a new one its own default, of up to half an hour."""
    assert dist.group.WORLD is not None
    backend = dist.group.WORLD._get_backend(control_device(dist.group.WORLD))
    found: datetime.timedelta | None = getattr(backend.options, "_timeout", None)
    return found


def _most_groups(groups: Iterable[dist.ProcessGroup | None]) -> int:
    """The most groups that a rank of these has; a collective."""
    return _most([_num_groups()], groups)[0]


def _most(numbers: list[int], groups: Iterable[dist.ProcessGroup | None]) -> list[int]:
    """Maxima over one group after the other."""
    for group in groups:
        numbers = max_over(torch.tensor(numbers, device=control_device(group)), group).tolist()
    return numbers


def _num_groups() -> int:
    return len(dist.distributed_c10d._world.pg_names)


def _is_alive(group: dist.ProcessGroup | None) -> TypeGuard[dist.ProcessGroup]:
    """Whether there is a group, and not of a job that was ended before."""
    return group in dist.distributed_c10d._world.pg_map


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def this_rank() -> int:
    """Of this process, in the job; 0 where there is one process."""
    return dist.get_rank() if _is_distributed() else 0


def _num_ranks() -> int:
    return dist.get_world_size() if _is_distributed() else 1


def _is_whole(ranks: Ranks) -> bool:
    return len(ranks) == _num_ranks()


def _members(group: dist.ProcessGroup) -> Ranks:
    return tuple(sorted(dist.get_process_group_ranks(group)))


def _ranks_of(mesh: DeviceMesh) -> Ranks:
    return tuple(sorted(int(rank) for rank in mesh.mesh.flatten().tolist()))
