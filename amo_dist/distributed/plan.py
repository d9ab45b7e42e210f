"""Who sends what to whom, and who computes what: a description, made without communication.

A plan is a list of buckets. In a bucket each owner gathers at most a stated number of bytes (or
one matrix that is larger), so that every rank of the mesh has work in every bucket and memory is
bounded by the buckets in flight.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import TypeAlias

from amo_dist.config import Box
from amo_dist.distributed.layout import MatrixLayout, Piece
from amo_dist.distributed.ownership import Job


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A piece of one of the matrices.

    Attributes:
        matrix: Index of the matrix.
        piece: Where it lies in the local tensor of the rank that holds it, and in the matrix.
    """

    matrix: int
    piece: Piece


PartsByPeer: TypeAlias = tuple[tuple[Part, ...], ...]
"""One entry for each peer, in the order of the process group; parts in the order in which they
travel."""


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """Matrices, or slabs of them, that their owner computes together.

    Attributes:
        owned: Their indices.
        reported: Those of them whose observation this rank reports.
        kept: The parts of them that this rank holds itself, and that travel nowhere.
        boxes: What this rank computes of each, in the coordinates of the matrix.
        team: The ranks that share all of them; empty where this rank has them whole.
    """

    owned: tuple[int, ...]
    reported: frozenset[int]
    kept: tuple[Part, ...]
    boxes: tuple[Box, ...]
    team: tuple[int, ...]

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Of the boxes."""
        return [(bottom - top, right - left) for (top, bottom), (left, right) in self.boxes]


@dataclasses.dataclass(frozen=True, slots=True)
class Transfer:
    """One all-to-all, seen from one rank; its own entries are empty.

    Attributes:
        send: What goes to each peer.
        receive: What comes from each peer.
    """

    send: PartsByPeer
    receive: PartsByPeer


@dataclasses.dataclass(frozen=True, slots=True)
class Bucket:
    """Matrices that travel together, seen from one rank.

    Attributes:
        wide: True where matrices travel in the dtype of the momentum, for observation.
        tasks: What this rank computes.
        gather: Parts of matrices, on their way to the owner.
        deliver: Parts of results, on their way from the owner to all whom it serves.
        forward: The same parts, on their way from a relay to others that hold them; None where no
            peer forwards any.
    """

    wide: bool
    tasks: tuple[Task, ...]
    gather: Transfer
    deliver: Transfer
    forward: Transfer | None

    @property
    def owned(self) -> tuple[int, ...]:
        """Matrices that this rank orthogonalizes, task after task."""
        return tuple(index for task in self.tasks for index in task.owned)


@dataclasses.dataclass(frozen=True, slots=True)
class ExchangePlan:
    """All buckets of one set of ranks, seen from one of them.

    Attributes:
        peers: Global ranks, in the order of the process group.
        buckets: The same number, in the same order, on every peer.
        local: This rank's buckets of matrices that need no communication.
        digest: Equal on all peers if and only if their plans fit together.
    """

    peers: tuple[int, ...]
    buckets: tuple[Bucket, ...]
    local: tuple[Bucket, ...]
    digest: str


Split: TypeAlias = Callable[[tuple[int, ...]], Sequence[tuple[int, ...]]]
"""Divides the matrices that a rank owns in a bucket into tasks."""


def _is_local(job: Job, matrix: MatrixLayout) -> bool:
    """Whether the owner has nothing to gather and nothing to deliver."""
    others = {*job.sources, *job.targets, *job.team} - {job.owner}
    return matrix.pieces_by_rank.keys().isdisjoint(others)


def plan_exchange(
    matrices: Sequence[MatrixLayout],
    jobs: Sequence[Job],
    *,
    rank: int,
    peers: Sequence[int],
    bytes_by_matrix: Sequence[int],
    bucket_bytes: int,
    wide: frozenset[int] = frozenset(),
    split: Split | None = None,
) -> ExchangePlan:
    """Plan the exchange of ``jobs``, which all lie on ``peers``.

    Args:
        matrices: All matrices; jobs index them.
        jobs: Those of one set of ranks, in the same order on every rank.
        rank: Whose view to plan.
        peers: Global ranks in the order of the process group.
        bytes_by_matrix: Size of each gathered matrix.
        bucket_bytes: Greatest size of what one owner gathers in one bucket.
        wide: Matrices that travel in the dtype of the momentum; they have buckets of their own.
        split: Which owned matrices of a bucket are computed together; None: all of them. Those of
            one team always are.

    Members of a team communicate while they compute. So that none waits for another that waits for
    it, all slabs of a matrix lie in buckets of one number, and in a bucket each rank comes to what
    it shares before all else, in the order of ``jobs``; the digest tells this order.
    """
    moving = [job for job in jobs if not _is_local(job, matrices[job.matrix])]
    own = [job for job in jobs if job.owner == rank and _is_local(job, matrices[job.matrix])]
    itemsizes = [
        size // matrix.num_elements for size, matrix in zip(bytes_by_matrix, matrices, strict=True)
    ]
    groups, local = (_group(some, itemsizes, bucket_bytes, wide) for some in (moving, own))
    make = functools.partial(_bucket, matrices, rank, peers, split)
    told = [str(tuple(peers))]
    for is_wide, some in groups:
        told.append(f"bucket {is_wide}")
        told += [
            f"{matrices[job.matrix].key} by {job.owner} of {job.team}, {job.forwards}"
            for job in some
        ]
    return ExchangePlan(
        peers=tuple(peers),
        buckets=tuple(make(*group) for group in groups),
        local=tuple(make(*group) for group in local),
        digest=hashlib.sha256("\n".join(told).encode()).hexdigest(),
    )


def _group(
    jobs: Sequence[Job],
    itemsizes: Sequence[int],
    bucket_bytes: int,
    wide: frozenset[int],
) -> list[tuple[bool, list[Job]]]:
    """Cut ``jobs`` into buckets; observed matrices come first, in buckets of their own."""
    buckets: dict[tuple[bool, int], list[tuple[int, Job]]] = defaultdict(list)
    # Of each owner: the bucket at hand, and the bytes in it.
    numbers, filled = Counter[tuple[bool, int]](), Counter[tuple[bool, int]]()
    for some in _together(jobs):
        index = some[0][1].matrix
        is_narrow = index not in wide
        sides = ([stop - start for start, stop in job.box] for _, job in some)
        size = itemsizes[index] * max(map(math.prod, sides))
        keys = [(is_narrow, job.owner) for _, job in some]
        is_full = [filled[key] > 0 and filled[key] + size > bucket_bytes for key in keys]
        number = max(numbers[key] + full for key, full in zip(keys, is_full, strict=True))
        for key in keys:
            filled[key] = size + (filled[key] if numbers[key] == number else 0)
            numbers[key] = number
        buckets[is_narrow, number] += some
    in_order = {key: sorted(some, key=operator.itemgetter(0)) for key, some in buckets.items()}
    return [(not key[0], [job for _, job in in_order[key]]) for key in sorted(in_order)]


def _together(jobs: Sequence[Job]) -> list[list[tuple[int, Job]]]:
    """Places and jobs that must share a bucket: those of a team, the largest teams first.

    What is shared comes before all else, so that the buckets of a team's members keep pace.
    """
    teams: dict[tuple[int, tuple[int, ...]], list[tuple[int, Job]]] = defaultdict(list)
    for place, job in enumerate(jobs):
        teams[job.matrix, job.team or (job.owner,)].append((place, job))
    return sorted(teams.values(), key=len, reverse=True)


def _bucket(
    matrices: Sequence[MatrixLayout],
    rank: int,
    peers: Sequence[int],
    split: Split | None,
    is_wide: bool,
    jobs: Sequence[Job],
) -> Bucket:
    by_owner: dict[int, list[Job]] = defaultdict(list)
    for job in jobs:
        by_owner[job.owner].append(job)

    def parts(owner: int, holder: int, role: str) -> tuple[Part, ...]:
        """What travels between an owner and a rank of its ``sources`` or ``targets``."""
        # An owner is among both of its own matrices, but sends itself nothing.
        found = by_owner[owner] if owner != holder else []
        return _held(matrices, [job for job in found if holder in getattr(job, role)], holder)

    def forwarded(relay: int, holder: int) -> tuple[Part, ...]:
        found = [job for job in jobs if holder in job.forwards.get(relay, ())]
        return _held(matrices, found, holder)

    own = {job.matrix: job for job in by_owner[rank]}
    by_team: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, job in own.items():
        by_team[job.team].append(index)
    alone = tuple(by_team.pop((), ()))
    tasks = [*map(tuple, by_team.values()), *(split(alone) if split else [alone])]
    return Bucket(
        wide=is_wide,
        tasks=tuple(_task(matrices, [own[index] for index in task]) for task in tasks if task),
        gather=Transfer(
            send=tuple(parts(peer, rank, "sources") for peer in peers),
            receive=tuple(parts(rank, peer, "sources") for peer in peers),
        ),
        deliver=Transfer(
            send=tuple(parts(rank, peer, "targets") for peer in peers),
            receive=tuple(parts(peer, rank, "targets") for peer in peers),
        ),
        forward=Transfer(
            send=tuple(forwarded(rank, peer) for peer in peers),
            receive=tuple(forwarded(peer, rank) for peer in peers),
        )
        if any(job.forwards for job in jobs)
        else None,
    )


def _task(matrices: Sequence[MatrixLayout], jobs: Sequence[Job]) -> Task:
    return Task(
        owned=tuple(job.matrix for job in jobs),
        reported=frozenset(job.matrix for job in jobs if job.reports),
        kept=_held(matrices, jobs, jobs[0].owner),
        boxes=tuple(job.box for job in jobs),
        team=jobs[0].team,
    )


def _held(matrices: Sequence[MatrixLayout], jobs: Sequence[Job], rank: int) -> tuple[Part, ...]:
    """The parts that a rank holds of what some jobs compute, job after job."""
    found = ((job.matrix, matrices[job.matrix].pieces_of(rank, job.box)) for job in jobs)
    return tuple(Part(index, piece) for index, pieces in found for piece in pieces)


def count_elements(parts: Sequence[Part]) -> int:
    """Elements of all parts together."""
    return sum(part.piece.num_elements for part in parts)
