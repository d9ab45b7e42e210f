"""Which ranks an optimizer runs on, and the process groups of sets of them."""

from __future__ import annotations

import contextlib
import datetime
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from amo_dist.distributed.agreement import (
    RankMismatchError,
    control_device,
    fingerprint56,
    gather_json,
    max_over,
)

logger = logging.getLogger(__name__)

Ranks: TypeAlias = tuple[int, ...]
"""Global ranks, sorted."""
GroupLike: TypeAlias = "dist.ProcessGroup | DeviceMesh | None"
"""What a user may pass as ``process_group``."""

_WARN_AFTER_S = 60.0
"""Seconds until a rank says for whom it waits."""


def replica_ranks(given: GroupLike) -> list[int]:
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


class PicklableGroup:
    """``process_group`` of an optimizer in its copies, as PyTorch copies no process group.

    A deep copy has the same one. A pickled one has the job's group of the same ranks.

    Args:
        group: ``process_group`` of `Muon`.
        ranks: Ranks of the world.

    Raises:
        ValueError: The job that reads a pickled one has no such group on this rank.
    """

    def __init__(self, group: GroupLike, ranks: Ranks) -> None:
        self.group, self._ranks = group, ranks

    def __deepcopy__(self, memo: object) -> PicklableGroup:
        return self

    def __reduce__(self) -> tuple[Callable[..., PicklableGroup], tuple[object, ...]]:
        return PicklableGroup._read, (self.group is None, self._ranks)

    @staticmethod
    def _read(is_default: bool, ranks: Ranks) -> PicklableGroup:
        if is_default or not _is_distributed():
            return PicklableGroup(None, ranks)
        if ranks in (known := _groups_of_the_job()):
            return PicklableGroup(known[ranks], ranks)
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

    def __init__(self, tensors: Iterable[Tensor], given: GroupLike) -> None:
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
            ValueError: On every rank: there is no such group.
        """
        if len(self.ranks) == 1:
            return None
        self._compare()
        known = self._known()
        if self.ranks not in known:
            raise ValueError(
                f"process_group: found no group of ranks {list(self.ranks)}, those of the "
                "parameters' meshes, expected one where they are not the whole job: have all ranks "
                f"of the job make it, group = dist.new_group({list(self.ranks)}), and pass "
                "process_group=group"
            )
        return known[self.ranks]

    def groups(
        self, wanted: Iterable[Ranks], world: dist.ProcessGroup | None
    ) -> dict[Ranks, dist.ProcessGroup | None]:
        """Process group of each set of ranks, None of a single rank; a collective over the world.

        Where the world is the whole job it makes those that a rank misses, all ranks taking part,
        as PyTorch wants it: NCCL can then split each off a communicator of the job.

        Args:
            wanted: Sets with this rank in them.
            world: What `join` returned.

        Raises:
            ValueError: On every rank: one misses a group, and others of the job would have to help.
        """
        wanted = sorted(set(wanted))
        known = self._known() if world is not None else {}
        missing = [ranks for ranks in wanted if len(ranks) > 1 and ranks not in known]
        of_all = sorted({tuple(ranks) for some in gather_json(missing, world) for ranks in some})
        if of_all and not _is_whole(self.ranks):
            raise ValueError(
                f"process_group: found no group of ranks {list(of_all[0])}, which share a matrix, "
                f"in a world of ranks {list(self.ranks)}, expected one where these are not the "
                "whole job: have all ranks of the job make it before the first step, "
                f"dist.new_group({list(of_all[0])})"
            )
        for ranks in of_all:
            made = dist.new_group(list(ranks), timeout=_timeout())
            if this_rank() in ranks:
                known[ranks] = made
        return {ranks: known[ranks] if len(ranks) > 1 else None for ranks in wanted}

    @contextlib.contextmanager
    def patience(self) -> Iterator[None]:
        """Log once for whom this rank waits, if the body takes long."""
        text = (
            "rank %d has waited %g s for ranks %s, the world of its optimizer, to take their first "
            "step or to load a state; where others train than these, pass process_group to it"
        )
        told = (text, this_rank(), _WARN_AFTER_S, list(self.ranks))
        timer = threading.Timer(_WARN_AFTER_S, logger.warning, told)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _known(self) -> dict[Ranks, dist.ProcessGroup]:
        """The groups that are there, by their ranks: the user's, the job's, those of meshes.

        Ranks that cannot make one, as they are not the whole job, take any other.
        """
        axes = (
            mesh.get_group(axis)
            for mesh in reversed(self._meshes)
            for axis in range(mesh.ndim)
            if mesh.size(axis) > 1
        )
        given = [] if self._group is None else [self._group]
        found = {_members(group): group for group in (*axes, *given)}
        whole = dist.group.WORLD
        assert whole is not None
        others = {} if _is_whole(self.ranks) else _groups_of_the_job()
        return {**others, **found, _members(whole): whole}

    def _compare(self) -> None:
        """Compare worlds over the meshes that are not the whole job.

        Each mesh has a group for each of its axes. All ranks go through their meshes in the same
        order, and none raises before it has told all of them.
        """
        if self._group is not None:
            return
        small = [root for root, ranks in self._ranks_by_root.items() if not _is_whole(ranks)]
        small.sort(key=self._ranks_by_root.__getitem__)
        mark = fingerprint56(str(self.ranks))
        marks = [mark, -mark]
        for mesh in small:
            for axis in range(mesh.ndim):
                if mesh.size(axis) > 1:
                    group = mesh.get_group(axis)
                    told = torch.tensor(marks, device=control_device(group))
                    marks = max_over(told, group).tolist()
        if marks[0] != -marks[1]:
            raise RankMismatchError(
                f"the world of an optimizer: this rank has {list(self.ranks)}, the ranks of its "
                "parameters' meshes, and a rank that shares a mesh has others; pass process_group, "
                "a group of all these ranks, to the optimizers of all of them"
            )


def _groups_of_the_job() -> dict[Ranks, dist.ProcessGroup]:
    """By ranks, the first that was made: of several alike the same one on all of its ranks.

    Those with other backends are for something else, as for checkpoints on the host.
    """
    backends = dist.get_backend_config()
    groups = reversed([*dist.distributed_c10d._world.pg_map])
    return {_members(each): each for each in groups if dist.get_backend_config(each) == backends}


def _timeout() -> datetime.timedelta | None:
    """That of the job's group: PyTorch gives a new one its own default, of up to half an hour."""
    assert dist.group.WORLD is not None
    backend = dist.group.WORLD._get_backend(control_device(dist.group.WORLD))
    found: datetime.timedelta | None = getattr(backend.options, "_timeout", None)
    return found


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
