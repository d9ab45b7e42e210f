"""Ranks of an optimizer: its world, process groups of sets of them, and what all of them compare.

Most functions are collectives over a group, which all of its ranks call in the same order. Without
a group (one process) they return what they get.
"""

from __future__ import annotations

import datetime
import hashlib
import itertools
import json
import os
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from amo_dist.compat import group_timeout, process_groups, root_mesh
from amo_dist.config import require

# Global ranks, sorted.
Ranks: TypeAlias = tuple[int, ...]
# Values that a user may pass as ``process_group``.
GroupLike: TypeAlias = "dist.ProcessGroup | DeviceMesh | None"

# Start of a text that reports a failure.
_FAILED = "\0failed\0"
# Folder of this package, with a separator at its end.
_PACKAGE = f"{Path(__file__).resolve().parents[1]}{os.sep}"


class RankMismatchError(RuntimeError):
    """Ranks hold different configurations, parameters, plans or checkpoints."""


# ---------------------------------------------------------------- small messages

# Device of the matrices, by group. Keys are objects, as a later group may get an earlier name.
_devices: WeakKeyDictionary[dist.ProcessGroup, torch.device] = WeakKeyDictionary()


def control_device(group: dist.ProcessGroup | None) -> torch.device:
    """Device of small control tensors: the CPU if the group has a backend for it.

    Else it is that of the matrices, not the current one: a script may never have set that.
    """
    if group is None or "cpu:" in dist.get_backend_config(group):
        return torch.device("cpu")
    return _devices[group]


def max_over(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Elementwise maximum over ranks, in place."""
    if group is not None:
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    return values


def gather_json(value: Any, group: dist.ProcessGroup | None) -> dict[int, Any]:
    """JSON values by global rank, in the order of the group; equal ones are one object.

    Each distinct text travels once, and none travels if all are alike. A thousand ranks of a few
    kinds (pipeline stages) would otherwise send gigabytes.
    """
    text = json.dumps(value)
    if group is None:
        return {this_rank(): json.loads(text)}
    digest = list(hashlib.sha256(text.encode()).digest())
    own = torch.tensor(digest, dtype=torch.uint8, device=control_device(group))
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own, group=group)
    digests = [bytes(part.tolist()) for part in parts]
    values = {digests[dist.get_rank(group)]: json.loads(text)}
    distinct = list(dict.fromkeys(digests))
    for other in distinct if len(distinct) > 1 else ():
        values[other] = json.loads(_broadcast(text, group, digests.index(other)))
    return dict(zip(members(group), map(values.__getitem__, digests), strict=True))


def _broadcast(text: str, group: dist.ProcessGroup, source: int) -> str:
    """The text of the rank ``source`` of the group; it travels as a tensor and not as a pickle."""
    device, is_source = control_device(group), dist.get_rank(group) == source
    payload = list(text.encode()) if is_source else []
    size = torch.tensor([len(payload)], device=device)
    dist.broadcast(size, group=group, group_src=source)
    buffer = torch.tensor(payload or [0] * int(size.item()), dtype=torch.uint8, device=device)
    dist.broadcast(buffer, group=group, group_src=source)
    return bytes(buffer.tolist()).decode()


# ---------------------------------------------------------------- comparisons


def fingerprint56(text: str) -> int:
    """A positive integer of 56 bits that differs between different texts."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def failure_text(activity: str, error: Exception) -> str:
    """A text for `check_alike` that makes all ranks raise what failed on this one.

    Args:
        activity: Name of what failed.
        error: Error of this rank. All ranks raise ``ValueError`` for a ``ValueError``, and
            ``RuntimeError``, with the place in this package, for any other.
    """
    kind, place = type(error).__name__, ""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename.startswith(_PACKAGE)]
    if own and kind != "ValueError":
        place = f" in {own[-1].name} ({own[-1].filename[len(_PACKAGE) :]}:{own[-1].lineno})"
    text = f"{activity} failed on rank {this_rank()}{place}: {kind}: {error}"
    return f"{_FAILED}{kind}{_FAILED}{text}"


def check_alike(subject: str, text: str, group: dist.ProcessGroup | None) -> None:
    """Raise on every rank if the ranks of the world hold different texts.

    Args:
        subject: Name of the text, for the error.
        text: Text of this rank.
        group: Group of the world.

    Raises:
        RankMismatchError: Names the ranks that differ from the first, and a line that differs.
        RuntimeError: A text is a `failure_text`; names its rank and its error.
        ValueError: Likewise, for a ``ValueError``.
    """
    ranks = members(group)
    raise_if_unlike(
        subject, {rank: [(ranks, own)] for rank, own in gather_json(text, group).items()}
    )


def raise_if_unlike(
    subject: str, pairs_by_rank: Mapping[int, Sequence[tuple[Sequence[int], str]]]
) -> None:
    """Raise for texts that differ within a set of ranks; see `gather_json`.

    Every rank of the world raises for a mismatch, also a rank outside of the set: it would
    otherwise wait for the others in the next collective.

    Args:
        subject: Name of the texts, for the error.
        pairs_by_rank: Pairs of a set of global ranks and the text for it, by rank of the world; a
            rank has a pair for each set that it belongs to.

    Raises:
        RankMismatchError: Names the ranks of a set that differ from its first, or that do not
            know of it, and a line that differs.
        RuntimeError: A text is a `failure_text`, see `check_alike`.
    """
    texts: dict[Ranks, dict[int, str]] = {}
    for rank, pairs in pairs_by_rank.items():
        for ranks, text in pairs:
            if text.startswith(_FAILED):
                _, kind, message = text.split(_FAILED, 2)
                raise ValueError(message) if kind == "ValueError" else RuntimeError(message)
            texts.setdefault(tuple(ranks), {})[rank] = text
    for ranks in sorted(texts):
        first, *others = (texts[ranks].get(rank, "nothing") for rank in ranks)
        unlike = [rank for rank, text in zip(ranks[1:], others, strict=True) if text != first]
        if unlike:
            ours, theirs = _first_difference(first, texts[ranks].get(unlike[0], "nothing"))
            raise RankMismatchError(
                f"{subject}: rank(s) {', '.join(map(str, unlike))} differ from rank {ranks[0]}; "
                f"rank {ranks[0]} has {ours}; rank {unlike[0]} has {theirs}"
            )


def _first_difference(left: str, right: str) -> tuple[str, str]:
    """The first line of each text that the other lacks, or the first place of another order."""
    left_lines, right_lines = left.split("\n"), right.split("\n")
    if set(left_lines) == set(right_lines):
        pairs = itertools.zip_longest(left_lines, right_lines, fillvalue="nothing")
        return next(pair for pair in pairs if pair[0] != pair[1])
    return (
        next((line for line in left_lines if line not in right_lines), "nothing"),
        next((line for line in right_lines if line not in left_lines), "nothing"),
    )


# ---------------------------------------------------------------- the world and its groups


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
        self._group = process_group if isinstance(process_group, dist.ProcessGroup) else None
        self._roots = list(dict.fromkeys(map(root_mesh, meshes)))
        self._meshes = [*meshes, *self._roots]
        if self._group is not None:
            self.ranks = _sorted_members(self._group)
            for ranks in map(_ranks_of_mesh, meshes):
                expected = f"all of {ranks}, the ranks of a parameter's mesh"
                is_inside = set(ranks) <= set(self.ranks)
                require(is_inside, "process_group", f"ranks {self.ranks}", expected)
        elif self._roots:
            self.ranks = tuple(sorted(set().union(*map(_ranks_of_mesh, self._roots))))
        else:
            self.ranks = tuple(range(_num_ranks()))

    def world_group(self, device: torch.device) -> dist.ProcessGroup | None:
        """The process group of the world, None for a single rank; a collective over these ranks.

        Args:
            device: Device of the matrices, on which small messages travel where a group has no
                backend for the CPU.

        Raises:
            RankMismatchError: Ranks that share a mesh have different worlds; on every rank.
            ValueError: No such group exists, or it has no backend for the device; on every rank.
        """
        if len(self.ranks) == 1:
            return None
        known = self._known()
        if device.type != "cpu":
            _devices.update(dict.fromkeys(known.values(), device))
        self._compare_worlds()
        expected = (
            "one where they are not the whole job: have all ranks of the job make it, group = "
            f"dist.new_group({list(self.ranks)}), and pass process_group=group"
        )
        missing = f"no group of ranks {list(self.ranks)}, those of the parameters' meshes"
        require(self.ranks in known, "process_group", missing, expected)
        backends = dist.get_backend_config(known[self.ranks])
        needed = "'cpu:gloo,cuda:nccl'" if device.type in ("cpu", "cuda") else "one for both"
        expected = f"a backend for {device.type}: init_process_group({needed})"
        own = f"the backends {backends!r} and parameters on {device.type}"
        require(f"{device.type}:" in backends, "process_group", own, expected)
        return known[self.ranks]

    def groups(
        self, rank_sets: Iterable[Ranks], world: dist.ProcessGroup | None
    ) -> dict[Ranks, dist.ProcessGroup | None]:
        """Process group by set of ranks, None for a single rank; a collective over the world.

        If the world is the whole job, this makes the groups that a rank lacks. All ranks take part,
        as PyTorch requires: NCCL can then split each group off a communicator of the job.

        Args:
            rank_sets: Sets of ranks that this rank belongs to.
            world: Group that `world_group` returned.

        Raises:
            ValueError: A group is missing, and ranks outside of the world would have to help to
                make it; on every rank.
        """
        rank_sets = sorted(set(rank_sets))
        known = self._known() if world is not None else {}
        missing = [ranks for ranks in rank_sets if len(ranks) > 1 and ranks not in known]
        gathered = gather_json(missing, world).values()
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
        group_by_ranks = {_sorted_members(group): group for group in (*axes, *own)}
        whole = dist.group.WORLD
        assert whole is not None
        others = {} if _is_whole(self.ranks) else _groups_of_the_job()
        return {**others, **group_by_ranks, _sorted_members(whole): whole}

    def _compare_worlds(self) -> None:
        """Compare worlds over the meshes that are not the whole job.

        A mesh has one group per axis. All ranks visit their meshes in the same order, and none
        raises before it has sent its mark through all of them, or the others would hang.
        """
        small = [] if self._group is not None else sorted(self._roots, key=_ranks_of_mesh)
        mark = fingerprint56(str(self.ranks))
        marks = [mark, -mark]
        for mesh in small:
            for axis in range(mesh.ndim if not _is_whole(_ranks_of_mesh(mesh)) else 0):
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
        own = f"{process_group!r} on rank {this_rank()}"
        require(False, "process_group", own, "a process group with this rank in it, or a mesh")
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

    def __getstate__(self) -> tuple[bool, Ranks]:
        return self.group is None, self._ranks

    def __setstate__(self, state: tuple[bool, Ranks]) -> None:
        is_default, self._ranks = state
        known = _groups_of_the_job() if _is_distributed() and not is_default else {}
        self.group = known.get(self._ranks)
        is_complete, expected = not known or self.group is not None, "one, as when it was pickled"
        require(is_complete, "process_group", f"none of ranks {self._ranks}", expected)


def _groups_of_the_job() -> dict[Ranks, dist.ProcessGroup]:
    """Groups of the job by their ranks: of several with the same ranks the oldest, on all of them.

    Groups with other backends serve something else, such as checkpoints on the host.
    """
    backends = dist.get_backend_config()
    return {
        _sorted_members(group): group
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


def members(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """Global ranks of a group, in its order; this rank alone without a group."""
    return (this_rank(),) if group is None else tuple(dist.get_process_group_ranks(group))


def _sorted_members(group: dist.ProcessGroup) -> Ranks:
    return tuple(sorted(members(group)))


def _num_ranks() -> int:
    return dist.get_world_size() if _is_distributed() else 1


def _is_whole(ranks: Ranks) -> bool:
    return len(ranks) == _num_ranks()


def _ranks_of_mesh(mesh: DeviceMesh) -> Ranks:
    return tuple(sorted(int(rank) for rank in mesh.mesh.flatten().tolist()))
