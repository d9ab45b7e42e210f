"""Ranks that an optimizer runs on, and the process groups of sets of them."""

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

from amo_dist.compat import group_timeout, process_groups, root_mesh
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
"""Values that a user may pass as ``process_group``."""

_WARN_AFTER_S = 60.0
"""Seconds until a rank logs the ranks that it waits for."""


def replica_ranks(process_group: GroupLike) -> list[int]:
    """Global ranks over which plain tensors are replicas; this rank alone without a group.

    Raises:
        ValueError: Neither a mesh nor a process group that this rank is in.
    """
    if isinstance(process_group, DeviceMesh):
        return [int(rank) for rank in process_group.mesh.flatten().tolist()]
    if process_group is None:
        return [this_rank()]
    if not isinstance(process_group, dist.ProcessGroup):
        raise ValueError(
            f"process_group: found {process_group!r} on rank {this_rank()}, expected a process "
            "group with this rank in it, or a mesh"
        )
    return dist.get_process_group_ranks(process_group)


class PicklableGroup:
    """``process_group`` of an optimizer that is copied, as PyTorch copies no process group.

    A deep copy shares the group. A pickle finds the job's group of the same ranks when it is read.

    Args:
        group: ``process_group`` of `Muon`.
        ranks: Ranks of the world.

    Raises:
        ValueError: The job that reads a pickle has no such group on this rank.
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
    """The ranks of an optimizer's world, and the process groups that exist already.

    A slice of a mesh stands for the ranks of the whole mesh: stages of a pipeline, each on its
    slice, are one world.

    Args:
        tensors: Parameters of the optimizer.
        process_group: ``process_group`` of `Muon`.

    Attributes:
        ranks: Ranks of ``process_group`` if it is a process group. Otherwise the ranks of the
            parameters' meshes and of ``process_group`` if it is a mesh. Without either, the ranks
            of the job.

    Raises:
        ValueError: A rank of a DTensor's mesh is not in ``process_group``.
    """

    def __init__(self, tensors: Iterable[Tensor], process_group: GroupLike) -> None:
        meshes = {tensor.device_mesh: None for tensor in tensors if isinstance(tensor, DTensor)}
        if isinstance(process_group, DeviceMesh):
            meshes[process_group] = None
        roots = {root_mesh(mesh): None for mesh in meshes}
        self._group = process_group if isinstance(process_group, dist.ProcessGroup) else None
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
        """The process group of the world, None for a single rank; a collective over these ranks.

        Raises:
            RankMismatchError: Ranks that share a mesh have different worlds; on every rank.
            ValueError: No such group exists; on every rank.
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
        self, rank_sets: Iterable[Ranks], world: dist.ProcessGroup | None
    ) -> dict[Ranks, dist.ProcessGroup | None]:
        """Process group by set of ranks, None for a single rank; a collective over the world.

        If the world is the whole job, this makes the groups that a rank lacks. All ranks take part,
        as PyTorch requires: NCCL can then split each group off a communicator of the job.

        Args:
            rank_sets: Sets of ranks that this rank belongs to.
            world: Group that `join` returned.

        Raises:
            ValueError: A group is missing, and ranks outside of the world would have to help to
                make it; on every rank.
        """
        rank_sets = sorted(set(rank_sets))
        known = self._known() if world is not None else {}
        missing = [ranks for ranks in rank_sets if len(ranks) > 1 and ranks not in known]
        gathered = gather_json(missing, world)
        to_make = sorted({tuple(ranks) for sets in gathered for ranks in sets})
        if to_make and not _is_whole(self.ranks):
            raise ValueError(
                f"process_group: found no group of ranks {list(to_make[0])}, which share a matrix, "
                f"in a world of ranks {list(self.ranks)}, expected one where these are not the "
                "whole job: have all ranks of the job make it before the first step, "
                f"dist.new_group({list(to_make[0])})"
            )
        for ranks in to_make:
            group = dist.new_group(list(ranks), timeout=_timeout())
            if this_rank() in ranks:
                known[ranks] = group
        return {ranks: known[ranks] if len(ranks) > 1 else None for ranks in rank_sets}

    @contextlib.contextmanager
    def patience(self) -> Iterator[None]:
        """Log once for which ranks this one waits, if the body takes long."""
        text = (
            "rank %d has waited %g s for ranks %s, the world of its optimizer, to take their first "
            "step or to load a state; where others train than these, pass process_group to it"
        )
        message = (text, this_rank(), _WARN_AFTER_S, list(self.ranks))
        timer = threading.Timer(_WARN_AFTER_S, logger.warning, message)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _known(self) -> dict[Ranks, dist.ProcessGroup]:
        """Groups that exist, by their ranks: the user's, the job's, those of meshes.

        A world that is not the whole job cannot make groups, and takes any other group as well.
        """
        axes = (
            mesh.get_group(axis)
            for mesh in reversed(self._meshes)
            for axis in range(mesh.ndim)
            if mesh.size(axis) > 1
        )
        own = [] if self._group is None else [self._group]
        group_by_ranks = {_members(group): group for group in (*axes, *own)}
        whole = dist.group.WORLD
        assert whole is not None
        others = {} if _is_whole(self.ranks) else _groups_of_the_job()
        return {**others, **group_by_ranks, _members(whole): whole}

    def _compare(self) -> None:
        """Compare worlds over the meshes that are not the whole job.

        A mesh has one group per axis. All ranks visit their meshes in the same order, and none
        raises before it has sent its mark through all of them, or the others would hang.
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
                    sent = torch.tensor(marks, device=control_device(group))
                    marks = max_over(sent, group).tolist()
        if marks[0] != -marks[1]:
            raise RankMismatchError(
                f"the world of an optimizer: this rank has {list(self.ranks)}, the ranks of its "
                "parameters' meshes, and a rank that shares a mesh has others; pass process_group, "
                "a group of all these ranks, to the optimizers of all of them"
            )


def _groups_of_the_job() -> dict[Ranks, dist.ProcessGroup]:
    """Groups of the job by their ranks: of several with the same ranks the oldest, on all of them.

    Groups with other backends serve something else, such as checkpoints on the host.
    """
    backends = dist.get_backend_config()
    return {
        _members(group): group
        for group in reversed(process_groups())
        if dist.get_backend_config(group) == backends
    }


def _timeout() -> datetime.timedelta | None:
    """Time-out of the job's group. A new group would get PyTorch's default, up to half an hour."""
    assert dist.group.WORLD is not None
    return group_timeout(dist.group.WORLD, control_device(dist.group.WORLD))


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def this_rank() -> int:
    """Rank of this process in the job; 0 for a single process."""
    return dist.get_rank() if _is_distributed() else 0


def _num_ranks() -> int:
    return dist.get_world_size() if _is_distributed() else 1


def _is_whole(ranks: Ranks) -> bool:
    return len(ranks) == _num_ranks()


def _members(group: dist.ProcessGroup) -> Ranks:
    return tuple(sorted(dist.get_process_group_ranks(group)))


def _ranks_of(mesh: DeviceMesh) -> Ranks:
    return tuple(sorted(int(rank) for rank in mesh.mesh.flatten().tolist()))
