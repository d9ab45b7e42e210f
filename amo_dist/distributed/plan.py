"""Who sends what to whom: a frozen description, made without any communication.

A plan is a list of buckets. In a bucket each owner gathers at most a stated number of bytes (or
one matrix that is larger), so that every rank of the mesh has work in every bucket and memory is
bounded by the buckets in flight.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence

from amo_dist.distributed.layout import MatrixLayout, Piece
from amo_dist.distributed.ownership import Job


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A piece of a matrix on its way.

    Attributes:
        matrix: Index of the matrix.
        piece: Its source is read, or its result written, where the piece lives; its target is
            the place in the matrix at the owner.
    """

    matrix: int
    piece: Piece


@dataclasses.dataclass(frozen=True, slots=True)
class Bucket:
    """Matrices that travel together, seen from one rank.

    The four tuples of parts are indexed by peer; the entry of the rank itself is empty.

    Attributes:
        wide: True where matrices travel in the dtype of the momentum, for observation.
        owned: Matrices that this rank orthogonalizes.
        reported: Those of them whose observation this rank reports.
        kept: Pieces of owned matrices that this rank holds itself and gathers from.
        returned: Pieces of owned matrices that this rank holds itself and writes back.
        gather_send: To each owner, pieces that this rank holds.
        gather_receive: From each rank, pieces of owned matrices.
        deliver_send: To each rank, pieces of the results.
        deliver_receive: From each owner, pieces of results that this rank holds.
    """

    wide: bool
    owned: tuple[int, ...]
    reported: frozenset[int]
    kept: tuple[Part, ...]
    returned: tuple[Part, ...]
    gather_send: tuple[tuple[Part, ...], ...]
    gather_receive: tuple[tuple[Part, ...], ...]
    deliver_send: tuple[tuple[Part, ...], ...]
    deliver_receive: tuple[tuple[Part, ...], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ExchangePlan:
    """All buckets of one set of ranks, seen from one of them.

    Attributes:
        peers: Global ranks, in the order of the process group.
        buckets: The same number, in the same order, on every peer.
        local: Matrices that need no communication: they travel nowhere.
        digest: Equal on all peers if and only if their plans fit together.
    """

    peers: tuple[int, ...]
    buckets: tuple[Bucket, ...]
    local: tuple[Bucket, ...]
    digest: str


def is_local(job: Job, matrix: MatrixLayout) -> bool:
    """Whether no other rank has a piece to send to, or to get from, the owner."""
    others = {*job.sources, *job.targets} - {job.owner}
    return all(rank not in matrix.pieces_by_rank for rank in others)


def make_plan(
    matrices: Sequence[MatrixLayout],
    jobs: Sequence[Job],
    *,
    rank: int,
    peers: Sequence[int],
    bytes_by_matrix: Sequence[int],
    bucket_bytes: int,
    wide: frozenset[int] = frozenset(),
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
    """
    local = [job for job in jobs if is_local(job, matrices[job.matrix])]
    moving = [job for job in jobs if not is_local(job, matrices[job.matrix])]
    groups = _group(moving, bytes_by_matrix, bucket_bytes, wide)
    own = _group([job for job in local if job.owner == rank], bytes_by_matrix, bucket_bytes, wide)
    return ExchangePlan(
        peers=tuple(peers),
        buckets=tuple(_bucket(matrices, group, rank, peers, wide) for wide, group in groups),
        local=tuple(_bucket(matrices, group, rank, peers, wide) for wide, group in own),
        digest=_digest(matrices, groups, peers),
    )


def _group(
    jobs: Sequence[Job],
    bytes_by_matrix: Sequence[int],
    bucket_bytes: int,
    wide: frozenset[int],
) -> list[tuple[bool, list[Job]]]:
    """Cut ``jobs`` into buckets; observed matrices come first, in buckets of their own."""
    return [
        (is_wide, bucket)
        for is_wide in (True, False)
        for bucket in _fill_buckets(
            [job for job in jobs if (job.matrix in wide) == is_wide], bytes_by_matrix, bucket_bytes
        )
    ]


def _fill_buckets(
    jobs: Sequence[Job], bytes_by_matrix: Sequence[int], bucket_bytes: int
) -> list[list[Job]]:
    buckets: list[list[Job]] = []
    index_by_owner: dict[int, int] = defaultdict(int)
    filled: dict[tuple[int, int], int] = defaultdict(int)
    for job in jobs:
        size, index = bytes_by_matrix[job.matrix], index_by_owner[job.owner]
        if filled[job.owner, index] and filled[job.owner, index] + size > bucket_bytes:
            index += 1
            index_by_owner[job.owner] = index
        filled[job.owner, index] += size
        if index == len(buckets):
            buckets.append([])
        buckets[index].append(job)
    return buckets


def _bucket(
    matrices: Sequence[MatrixLayout],
    jobs: Sequence[Job],
    rank: int,
    peers: Sequence[int],
    wide: bool,
) -> Bucket:
    sends: dict[str, dict[int, list[Part]]] = {
        key: {peer: [] for peer in peers}
        for key in ("gather_send", "gather_receive", "deliver_send", "deliver_receive")
    }
    kept: list[Part] = []
    returned: list[Part] = []
    for job in jobs:
        pieces_by_rank = matrices[job.matrix].pieces_by_rank
        if job.owner == rank:
            _add(sends["gather_receive"], kept, pieces_by_rank, job.matrix, job.sources, rank)
            _add(sends["deliver_send"], returned, pieces_by_rank, job.matrix, job.targets, rank)
            continue
        mine = [Part(job.matrix, piece) for piece in pieces_by_rank.get(rank, ())]
        if rank in job.sources:
            sends["gather_send"][job.owner].extend(mine)
        if rank in job.targets:
            sends["deliver_receive"][job.owner].extend(mine)
    owned = tuple(job.matrix for job in jobs if job.owner == rank)
    return Bucket(
        wide=wide,
        owned=owned,
        reported=frozenset(job.matrix for job in jobs if job.owner == rank and job.reports),
        kept=tuple(kept),
        returned=tuple(returned),
        **{key: tuple(tuple(parts[peer]) for peer in peers) for key, parts in sends.items()},
    )


def _add(
    by_peer: Mapping[int, list[Part]],
    own: list[Part],
    pieces_by_rank: Mapping[int, Sequence[Piece]],
    matrix: int,
    ranks: Sequence[int],
    rank: int,
) -> None:
    """File the pieces of one owned matrix under the peers that hold them."""
    for other in ranks:
        parts = own if other == rank else by_peer[other]
        parts.extend(Part(matrix, piece) for piece in pieces_by_rank.get(other, ()))


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


plan_exchange = make_plan
