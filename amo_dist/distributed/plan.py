"""Who sends what to whom, and who computes what: a description, made without communication.

A plan is a list of buckets. In a bucket each owner gathers at most a stated number of bytes (or
one matrix that is larger), so that every rank of the mesh has work in every bucket and memory is
bounded by the buckets in flight.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

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
    """Matrices that their owner computes together.

    Attributes:
        owned: Their indices.
        reported: Those of them whose observation this rank reports.
        kept: The parts of them that this rank holds itself, and that travel nowhere.
    """

    owned: tuple[int, ...]
    reported: frozenset[int]
    kept: tuple[Part, ...]


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
        deliver: Parts of results, on their way from the owner to all who hold one.
    """

    wide: bool
    tasks: tuple[Task, ...]
    gather: Transfer
    deliver: Transfer

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


def is_local(job: Job, matrix: MatrixLayout) -> bool:
    """Whether the owner has nothing to gather and nothing to deliver."""
    others = {*job.sources, *job.targets} - {job.owner}
    return all(rank not in matrix.pieces_by_rank for rank in others)


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
        split: Which owned matrices of a bucket are computed together; None: all of them.
    """
    moving: list[Job] = []
    local: list[Job] = []
    for job in jobs:
        if not is_local(job, matrices[job.matrix]):
            moving.append(job)
        elif job.owner == rank:
            local.append(job)
    groups, own = (_group(some, bytes_by_matrix, bucket_bytes, wide) for some in (moving, local))
    make = functools.partial(_bucket, matrices, rank, peers, split)
    return ExchangePlan(
        peers=tuple(peers),
        buckets=tuple(make(*group) for group in groups),
        local=tuple(make(*group) for group in own),
        digest=_digest(matrices, groups, peers),
    )


def _group(
    jobs: Sequence[Job],
    bytes_by_matrix: Sequence[int],
    bucket_bytes: int,
    wide: frozenset[int],
) -> list[tuple[bool, list[Job]]]:
    """Cut ``jobs`` into buckets; observed matrices come first, in buckets of their own."""
    buckets: dict[tuple[bool, int], list[Job]] = defaultdict(list)
    # Of each owner: the bucket at hand, and the bytes in it.
    numbers, filled = Counter[tuple[bool, int]](), Counter[tuple[bool, int]]()
    for job in jobs:
        is_narrow, size = job.matrix not in wide, bytes_by_matrix[job.matrix]
        key = (is_narrow, job.owner)
        if filled[key] and filled[key] + size > bucket_bytes:
            numbers[key] += 1
            filled[key] = 0
        filled[key] += size
        buckets[is_narrow, numbers[key]].append(job)
    return [(not is_narrow, buckets[is_narrow, number]) for is_narrow, number in sorted(buckets)]


def _bucket(
    matrices: Sequence[MatrixLayout],
    rank: int,
    peers: Sequence[int],
    split: Split | None,
    is_wide: bool,
    jobs: Sequence[Job],
) -> Bucket:
    gather_send, gather_receive, deliver_send, deliver_receive = (
        {peer: list[Part]() for peer in peers} for _ in range(4)
    )
    for job in jobs:
        pieces_by_rank = matrices[job.matrix].pieces_by_rank
        if job.owner == rank:
            for holders, side in ((job.sources, gather_receive), (job.targets, deliver_send)):
                for holder in holders:
                    pieces = pieces_by_rank.get(holder, ())
                    side[holder] += [Part(job.matrix, piece) for piece in pieces]
        else:
            mine = [Part(job.matrix, piece) for piece in pieces_by_rank.get(rank, ())]
            for holders, side in ((job.sources, gather_send), (job.targets, deliver_receive)):
                side[job.owner] += mine if rank in holders else []
    # An owner is a source and a target of its own matrices, but sends itself nothing.
    kept, gather_receive[rank], deliver_send[rank] = gather_receive[rank], [], []
    owned = [job for job in jobs if job.owner == rank]
    return Bucket(
        wide=is_wide,
        tasks=_tasks(owned, kept, split or (lambda indices: [indices])) if owned else (),
        gather=_transfer(gather_send, gather_receive),
        deliver=_transfer(deliver_send, deliver_receive),
    )


def _tasks(jobs: Sequence[Job], kept: Sequence[Part], split: Split) -> tuple[Task, ...]:
    reported = frozenset(job.matrix for job in jobs if job.reports)
    return tuple(
        Task(owned, reported.intersection(owned), tuple(p for p in kept if p.matrix in owned))
        for owned in split(tuple(job.matrix for job in jobs))
    )


def _transfer(send: Mapping[int, list[Part]], receive: Mapping[int, list[Part]]) -> Transfer:
    return Transfer(tuple(map(tuple, send.values())), tuple(map(tuple, receive.values())))


def _digest(
    matrices: Sequence[MatrixLayout],
    groups: Sequence[tuple[bool, Sequence[Job]]],
    peers: Sequence[int],
) -> str:
    digest = hashlib.sha256(repr(tuple(peers)).encode())
    for wide, jobs in groups:
        digest.update(f"bucket {wide}".encode())
        for job in jobs:
            digest.update(f"{matrices[job.matrix].key} by {job.owner}\n".encode())
    return digest.hexdigest()


def count_elements(parts: Sequence[Part]) -> int:
    """Elements of all parts together."""
    return sum(part.piece.num_elements for part in parts)
