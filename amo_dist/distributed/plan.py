"""Owners of matrices, and the plan of an exchange, made without communication.

An owner holds a matrix during a step alone; no state moves with it. Who owns what is pure and
deterministic, the same on every rank, and changes once at most, at the lock. A plan is a list of
buckets. In a bucket each owner gathers at most a stated number of bytes (or one larger matrix), so
that every rank of the mesh has work in every bucket, and the buckets in flight bound the memory.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import TypeAlias

from amo_dist.distributed.layout import Matrix, Region
from amo_dist.distributed.ranks import Ranks

# Index of a matrix, and a region of it.
Held: TypeAlias = tuple[int, Region]
# Regions for each peer, in the order of the process group and in that in which they travel.
ByPeer: TypeAlias = tuple[tuple[Held, ...], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One matrix, orthogonalized by one rank.

    Attributes:
        matrix: Index of the matrix.
        owner: Rank that gathers the matrix, orthogonalizes it and sends the results back.
        sources: Ranks that together hold the matrix once: the owner's replica.
        targets: Ranks that get results from the owner: those of all replicas.
    """

    matrix: int
    owner: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]


def assign(
    matrices: Sequence[Matrix],
    costs: Sequence[float],
    *,
    indices: Sequence[int] | None = None,
    ownership: str = "balanced",
    returns: bool = True,
) -> dict[Ranks, list[Job]]:
    """Assign matrices to owner ranks, separately for each set of ranks that shares some.

    A rank that belongs to several sets must compute the same owners as ranks that know one set
    alone, so no set looks at the load of another.

    A matrix that one rank holds whole, such as an expert sharded on its first dim, goes to such a
    rank, and nothing need be gathered.

    Plain round robin resonates with the few shapes that a model repeats from layer to layer: where
    they divide the ranks, one rank gets the largest of them each time.

    Args:
        matrices: Matrices, in the order in which round robin assigns them.
        costs: Flops of each matrix, with its schedule of this moment.
        indices: Indices of the matrices to assign; None for all.
        ownership: ``balanced``: in the order of their costs, greatest first, ties by name, each
            matrix goes to the rank with the least work in the set so far; those that few ranks may
            own come first, and the others fill up around them. ``round_robin``: in their order, to
            the rank with the fewest.
        returns: Whether owners send results back; False where matrices are only measured.

    Returns:
        Jobs by set of ranks, sorted; those of a set in the order of their indices.
    """
    order: Iterable[int] = range(len(matrices)) if indices is None else indices
    jobs: dict[Ranks, list[Job]] = defaultdict(list)
    loads: dict[Ranks, dict[int, float]] = defaultdict(partial(defaultdict, float))
    # Loads that were noted of a set and its candidates, with places and ranks of candidates.
    heaps: dict[tuple[Ranks, Ranks], list[tuple[float, int, int]]] = {}
    # Matrices of one layout share their regions, and are known by them: a thousand ranks are
    # sorted, hashed and searched once for each layout.
    layout = {index: id(matrices[index].regions_by_rank) for index in order}
    known = {}
    for key, matrix in {key: matrices[index] for index, key in layout.items()}.items():
        ranks, candidates = tuple(sorted(matrix.ranks)), _candidates(matrix)
        if (ranks, candidates) not in heaps:
            heaps[ranks, candidates] = [(0.0, *pair) for pair in enumerate(candidates)]
        known[key] = jobs[ranks], loads[ranks], heaps[ranks, candidates]
    if ownership == "balanced":
        # Matrices with few candidates, whose heap is short, come first.
        keys = {i: (len(known[layout[i]][2]), -costs[i], matrices[i].name) for i in layout}
        order = sorted(layout, key=keys.__getitem__)
    sources: dict[tuple[int, int], Ranks] = {}
    for index in order:
        matrix, (own_jobs, own_loads, heap) = matrices[index], known[layout[index]]
        # Loads only grow: a rank whose load has grown since it was noted moves down.
        while heap[0][0] < (load := own_loads[heap[0][2]]):
            heapq.heapreplace(heap, (load, *heap[0][1:]))
        owner = heap[0][2]
        own_loads[owner] += costs[index] if ownership == "balanced" else 1.0
        home = id(matrix.replicas), owner
        if home not in sources:
            sources[home] = next(replica for replica in matrix.replicas if owner in replica)
        own_jobs.append(Job(index, owner, sources[home], matrix.ranks if returns else ()))
    return {ranks: sorted(own, key=attrgetter("matrix")) for ranks, own in jobs.items()}


def _candidates(matrix: Matrix) -> Ranks:
    """Ranks that may own a matrix: those that hold it whole if there are any, else all."""
    size = matrix.num_elements
    whole = {rank for rank in matrix.regions_by_rank if matrix.num_held(rank) == size}
    return tuple(filter(whole.__contains__, matrix.ranks)) if whole else matrix.ranks


@dataclasses.dataclass(frozen=True, slots=True)
class BucketPlan:
    """Matrices that travel together, seen from one rank, which is among its own peers.

    Attributes:
        owned: Indices of the matrices that this rank owns.
        to_owners: Momentum that this rank sends to owners.
        from_holders: Momentum that this rank receives as an owner.
        to_holders: Results that this rank sends as an owner.
        from_owners: Results that this rank receives.
    """

    owned: tuple[int, ...]
    to_owners: ByPeer
    from_holders: ByPeer
    to_holders: ByPeer
    from_owners: ByPeer


@dataclasses.dataclass(frozen=True, slots=True)
class ExchangePlan:
    """All buckets of one set of ranks, seen from one of them.

    Attributes:
        rank: The rank from which they are seen.
        peers: Global ranks, in the order of the process group.
        buckets: Buckets that travel: the same number, in the same order, on every peer.
        local: This rank's buckets of matrices that need no communication.
    """

    rank: int
    peers: tuple[int, ...]
    buckets: tuple[BucketPlan, ...]
    local: tuple[BucketPlan, ...]

    @property
    def num_sent(self) -> int:
        """Elements that this rank sends to others in a step, in both directions."""
        return sum(
            count_elements(held)
            for bucket in self.buckets
            for held_by_peer in (bucket.to_owners, bucket.to_holders)
            for peer, held in zip(self.peers, held_by_peer, strict=True)
            if peer != self.rank
        )


def plan_exchange(
    matrices: Sequence[Matrix],
    jobs: Sequence[Job],
    *,
    rank: int,
    peers: Sequence[int],
    itemsize: int,
    bucket_bytes: int,
) -> ExchangePlan:
    """Plan the exchange of ``jobs``, which all lie on ``peers``.

    Args:
        matrices: All matrices; jobs index them.
        jobs: Jobs of one set of ranks, in the same order on every rank.
        rank: Rank whose view to plan.
        peers: Global ranks in the order of the process group.
        itemsize: Bytes of an element on the wire.
        bucket_bytes: Most bytes that one owner gathers in one bucket, times the number of replicas
            that get the results.
    """
    moving = [job for job in jobs if not _is_local(job, matrices[job.matrix])]
    own = [job for job in jobs if job.owner == rank and _is_local(job, matrices[job.matrix])]
    # A rank receives the results of the owners of all replicas.
    num_replicas = max((len(matrices[job.matrix].replicas) for job in moving), default=1)
    most = bucket_bytes // itemsize // num_replicas
    moving_groups, local_groups = (_group(part, matrices, most) for part in (moving, own))
    return ExchangePlan(
        rank=rank,
        peers=tuple(peers),
        buckets=tuple(_plan_bucket(matrices, rank, peers, group) for group in moving_groups),
        local=tuple(_plan_bucket(matrices, rank, peers, group) for group in local_groups),
    )


def _is_local(job: Job, matrix: Matrix) -> bool:
    """Whether the owner has nothing to gather and nothing to send back."""
    others = matrix.regions_by_rank.keys() - {job.owner}
    return others.isdisjoint(job.sources) and others.isdisjoint(job.targets)


def _group(jobs: Sequence[Job], matrices: Sequence[Matrix], most_elements: int) -> list[list[Job]]:
    """Cut ``jobs`` into buckets, in which no owner has more elements than this, or one job."""
    buckets: dict[int, list[Job]] = defaultdict(list)
    # Each owner has a bucket that it fills, and a number of elements in it.
    bucket_by_owner, filled_by_owner = Counter[int](), Counter[int]()
    for job in jobs:
        size, filled = matrices[job.matrix].num_elements, filled_by_owner[job.owner]
        if filled and filled + size > most_elements:
            bucket_by_owner[job.owner] += 1
            filled = 0
        filled_by_owner[job.owner] = filled + size
        buckets[bucket_by_owner[job.owner]].append(job)
    return [buckets[number] for number in sorted(buckets)]


def _plan_bucket(
    matrices: Sequence[Matrix], rank: int, peers: Sequence[int], jobs: Sequence[Job]
) -> BucketPlan:
    jobs_by_owner: dict[int, list[Job]] = defaultdict(list)
    for job in jobs:
        jobs_by_owner[job.owner].append(job)

    def travelling(owner: int, holder: int, role: str) -> tuple[Held, ...]:
        """Regions that travel between an owner and a rank of its ``sources`` or ``targets``."""
        return tuple(
            (job.matrix, region)
            for job in jobs_by_owner[owner]
            if holder in getattr(job, role)
            for region in matrices[job.matrix].regions_by_rank.get(holder, ())
        )

    return BucketPlan(
        owned=tuple(job.matrix for job in jobs_by_owner[rank]),
        to_owners=tuple(travelling(peer, rank, "sources") for peer in peers),
        from_holders=tuple(travelling(rank, peer, "sources") for peer in peers),
        to_holders=tuple(travelling(rank, peer, "targets") for peer in peers),
        from_owners=tuple(travelling(peer, rank, "targets") for peer in peers),
    )


def count_elements(held: Sequence[Held]) -> int:
    """Elements of all regions together."""
    return sum(region.num_elements for _, region in held)
