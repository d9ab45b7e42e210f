"""Who sends what to whom, and who computes what: a description, made without communication.

A plan is a list of buckets. In a bucket each owner gathers at most a stated number of bytes (or
one matrix that is larger), so that every rank of the mesh has work in every bucket and memory is
bounded by the buckets in flight.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import operator
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from amo_dist.distributed.layout import MatrixLayout, Piece
from amo_dist.distributed.ownership import Job


class Part(NamedTuple):
    """A piece of one of the matrices."""

    matrix: int
    """Index of the matrix."""
    piece: Piece
    """Where it lies in the local tensor of the rank that holds it, and in the matrix."""


PartsByPeer: TypeAlias = tuple[tuple[Part, ...], ...]
"""One entry for each peer, in the order of the process group; parts in the order in which they
travel."""


@dataclasses.dataclass(frozen=True, slots=True)
class Bucket:
    """Matrices that travel together, seen from one rank. Its own entries in transfers are empty.

    Attributes:
        jobs: What this rank computes: first what it shares, team after team, then the rest.
        kept: The parts of its jobs that this rank holds itself, and that travel nowhere.
        to_owners: Parts of matrices that this rank sends to their owners.
        from_holders: Parts of matrices that this rank receives as their owner.
        to_holders: Parts of results that this rank sends to all whom it serves.
        from_owners: Parts of results that this rank receives.
    """

    jobs: tuple[Job, ...]
    kept: tuple[Part, ...]
    to_owners: PartsByPeer
    from_holders: PartsByPeer
    to_holders: PartsByPeer
    from_owners: PartsByPeer


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

    def sent_elements(self) -> Counter[int]:
        """Elements that this rank sends to each peer, there and back."""
        sent = Counter[int]()
        for bucket in self.buckets:
            for transfer in (bucket.to_owners, bucket.to_holders):
                sent.update(dict(zip(self.peers, map(count_elements, transfer), strict=True)))
        return +sent


def plan_exchange(
    matrices: Sequence[MatrixLayout],
    jobs: Sequence[Job],
    *,
    rank: int,
    peers: Sequence[int],
    itemsize: int,
    bucket_bytes: int,
) -> ExchangePlan:
    """Plan the exchange of ``jobs``, which all lie on ``peers``.

    Members of a team communicate while they compute. So that none waits for another that waits for
    it, all slabs of a matrix lie in buckets of one number, and in a bucket each rank comes to what
    it shares before all else, in the order of ``jobs``; the digest tells this order.

    Args:
        matrices: All matrices; jobs index them.
        jobs: Those of one set of ranks, in the same order on every rank.
        rank: Whose view to plan.
        peers: Global ranks in the order of the process group.
        itemsize: Bytes of an element on the wire.
        bucket_bytes: Greatest size of what one owner gathers in one bucket.
    """
    moving = [job for job in jobs if not _is_local(job, matrices[job.matrix])]
    own = [job for job in jobs if job.owner == rank and _is_local(job, matrices[job.matrix])]
    most = bucket_bytes // itemsize
    groups, local = (_group(some, most) for some in (moving, own))
    told = [str(tuple(peers))]
    for some in groups:
        told.append("bucket")
        told += [f"{matrices[job.matrix].key} by {job.owner} of {job.team}" for job in some]
    return ExchangePlan(
        peers=tuple(peers),
        buckets=tuple(_bucket(matrices, rank, peers, some) for some in groups),
        local=tuple(_bucket(matrices, rank, peers, some) for some in local),
        digest=hashlib.sha256("\n".join(told).encode()).hexdigest(),
    )


def _is_local(job: Job, matrix: MatrixLayout) -> bool:
    """Whether the owner has nothing to gather and nothing to deliver."""
    others = {*job.sources, *job.targets, *job.team} - {job.owner}
    return matrix.pieces_by_rank.keys().isdisjoint(others)


def _group(jobs: Sequence[Job], most_elements: int) -> list[list[Job]]:
    """Cut ``jobs`` into buckets."""
    buckets: dict[int, list[tuple[int, Job]]] = defaultdict(list)
    # Of each owner: the bucket at hand, and the elements in it.
    numbers, filled = Counter[int](), Counter[int]()
    for some in _together(jobs):
        size = max(math.prod(job.shape) for _, job in some)
        owners = [job.owner for _, job in some]
        number = max(
            numbers[each] + (filled[each] > 0 and filled[each] + size > most_elements)
            for each in owners
        )
        for each in owners:
            filled[each] = size + (filled[each] if numbers[each] == number else 0)
            numbers[each] = number
        buckets[number] += some
    in_order = (sorted(buckets[number], key=operator.itemgetter(0)) for number in sorted(buckets))
    return [[job for _, job in some] for some in in_order]


def _together(jobs: Sequence[Job]) -> list[list[tuple[int, Job]]]:
    """Places and jobs that must share a bucket: those of a team, the largest teams first.

    What is shared comes before all else, so that the buckets of a team's members keep pace.
    """
    teams: dict[tuple[int, tuple[int, ...]], list[tuple[int, Job]]] = defaultdict(list)
    for place, job in enumerate(jobs):
        teams[job.matrix, job.team or (job.owner,)].append((place, job))
    return sorted(teams.values(), key=len, reverse=True)


def _bucket(
    matrices: Sequence[MatrixLayout], rank: int, peers: Sequence[int], jobs: Sequence[Job]
) -> Bucket:
    by_owner: dict[int, list[Job]] = defaultdict(list)
    for job in jobs:
        by_owner[job.owner].append(job)

    def parts(owner: int, holder: int, role: str) -> tuple[Part, ...]:
        """What travels between an owner and a rank of its ``sources`` or ``targets``."""
        # An owner is among both of its own matrices, but sends itself nothing.
        found = by_owner[owner] if owner != holder else []
        return _held(matrices, [job for job in found if holder in getattr(job, role)], holder)

    by_team: dict[tuple[int, ...], list[Job]] = defaultdict(list)
    for job in by_owner[rank]:
        by_team[job.team].append(job)
    alone = by_team.pop((), [])
    own = (*(job for some in by_team.values() for job in some), *alone)
    return Bucket(
        jobs=own,
        kept=_held(matrices, own, rank),
        to_owners=tuple(parts(peer, rank, "sources") for peer in peers),
        from_holders=tuple(parts(rank, peer, "sources") for peer in peers),
        to_holders=tuple(parts(rank, peer, "targets") for peer in peers),
        from_owners=tuple(parts(peer, rank, "targets") for peer in peers),
    )


def _held(matrices: Sequence[MatrixLayout], jobs: Sequence[Job], rank: int) -> tuple[Part, ...]:
    """The parts that a rank holds of what some jobs compute, job after job."""
    found = ((job.matrix, matrices[job.matrix].pieces_of(rank, job.box)) for job in jobs)
    return tuple(Part(index, piece) for index, pieces in found for piece in pieces)


def count_elements(parts: Sequence[Part]) -> int:
    """Elements of all parts together."""
    return sum(part.piece.num_elements for part in parts)
