"""Owners of matrices, and the plan of an exchange, made without communication.

An owner holds a matrix during a step alone; no state moves with it. Who owns what is pure and
deterministic, the same on every rank, and changes once at most, at the lock. A plan is a list of
buckets. In a bucket each owner gathers at most a stated number of bytes (or one larger matrix), so
that every rank of the mesh has work in every bucket, and the largest bucket bounds the memory.

With replicas (HSDP, DDP) an owner exchanges momentum and results with the ranks of its own replica.
From there results go along the replica axis: ranks that hold the same shard of all replicas, its
*copies*, gather from one another what the owners of each replica made::

                 shard 0   shard 1
    replica 0    rank 0 <-> rank 1      momentum to the owner, and results back
                   |          |
    replica 1    rank 2 <-> rank 3      results along the replica axis
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

from amo_dist.distributed.layout import Matrix, Region
from amo_dist.distributed.ranks import Ranks

# Elements. Each whole matrix starts at a multiple of this, aligned like a tensor of its own: the
# bits of a product may depend on that.
_ALIGNMENT = 64

# Index of a matrix, and a region of it.
Held: TypeAlias = tuple[int, Region]
# Regions for each rank of a process group, in its order and in that in which they travel.
ByPeer: TypeAlias = tuple[tuple[Held, ...], ...]
# `Matrix.replicas`.
Replicas: TypeAlias = tuple[Ranks, ...]
# Owner rank of each matrix by its index, in the order in which the matrices travel.
Owners: TypeAlias = Mapping[int, int]


def assign(
    matrices: Sequence[Matrix],
    costs: Sequence[float],
    *,
    indices: Sequence[int] | None = None,
    ownership: str = "balanced",
) -> dict[Replicas, Owners]:
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

    Returns:
        Owners of the matrices that have the same replicas, in an order that all ranks share.
    """
    order: Iterable[int] = range(len(matrices)) if indices is None else indices
    owners: dict[Replicas, dict[int, int]] = defaultdict(dict)
    loads: dict[Ranks, dict[int, float]] = defaultdict(partial(defaultdict, float))
    # For the candidates of a set: load when last looked at, place among them, and rank of each.
    heaps: dict[tuple[Ranks, Ranks], list[tuple[float, int, int]]] = {}
    # Matrices of one layout share their regions, and are known by them: a thousand ranks are
    # sorted, hashed and searched once for each layout.
    layout = {index: id(matrices[index].regions_by_rank) for index in order}
    known = {}
    for key, matrix in {key: matrices[index] for index, key in layout.items()}.items():
        ranks, candidates = tuple(sorted(matrix.ranks)), _candidates(matrix)
        if (ranks, candidates) not in heaps:
            heaps[ranks, candidates] = [(0.0, *pair) for pair in enumerate(candidates)]
        known[key] = owners[matrix.replicas], loads[ranks], heaps[ranks, candidates]
    if ownership == "balanced":
        # Matrices with few candidates, whose heap is short, come first.
        keys = {i: (len(known[layout[i]][2]), -costs[i], matrices[i].name) for i in layout}
        order = sorted(layout, key=keys.__getitem__)
    for index in order:
        own_owners, own_loads, heap = known[layout[index]]
        # Loads only grow: a rank whose load has grown since it was noted moves down.
        while heap[0][0] < (load := own_loads[heap[0][2]]):
            heapq.heapreplace(heap, (load, *heap[0][1:]))
        owner = own_owners[index] = heap[0][2]
        own_loads[owner] += costs[index] if ownership == "balanced" else 1.0
    in_order = sorted((sorted(itertools.chain(*replicas)), replicas) for replicas in owners)
    return {replicas: owners[replicas] for _, replicas in in_order}


def _candidates(matrix: Matrix) -> Ranks:
    """Ranks that may own a matrix: those that hold it whole if there are any, else all.

    Replicas take turns, so that they own alike, and send alike along the replica axis.
    """
    ranks = itertools.chain(*zip(*matrix.replicas, strict=True))
    size = matrix.num_elements
    whole = {rank for rank in matrix.regions_by_rank if matrix.num_held(rank) == size}
    return tuple(rank for rank in ranks if rank in whole or not whole)


def copies_of(replicas: Replicas, rank: int) -> Ranks:
    """Ranks that hold the same shards as one of them: one of each replica, in their order."""
    return next(ranks for ranks in zip(*replicas, strict=True) if rank in ranks)


@dataclasses.dataclass(frozen=True, slots=True)
class BucketPlan:
    """Matrices that travel together, seen from one rank, which is among its own peers.

    Attributes:
        owned: Indices of the matrices that this rank owns.
        to_owners: Momentum that this rank sends to owners; results come back in its place.
        from_holders: Momentum that this rank receives as an owner; results go back in its place.
        by_replica: Regions of this rank whose results the owners of each replica make, in the order
            of their group. Those of its own replica are those of ``to_owners``.
        num_by_replica: Elements of the longest of these lists; the others are padded to travel.
        place: Index of its own replica among them.
    """

    owned: tuple[int, ...]
    to_owners: ByPeer
    from_holders: ByPeer
    by_replica: ByPeer
    num_by_replica: int
    place: int


@dataclasses.dataclass(frozen=True, slots=True)
class ExchangePlan:
    """All buckets of matrices with the same replicas, seen from one of their ranks.

    Attributes:
        rank: The rank from which they are seen.
        peers: Global ranks, in the order of the process group.
        copies: Ranks with the same shards, one of each replica, in the order of their group.
        buckets: Buckets that travel: the same number, in the same order, on every peer.
        local: This rank's buckets of matrices that need no communication.
        returns: Whether owners send results back.
    """

    rank: int
    peers: tuple[int, ...]
    copies: tuple[int, ...]
    buckets: tuple[BucketPlan, ...]
    local: tuple[BucketPlan, ...]
    returns: bool

    @property
    def num_sent(self) -> int:
        """Elements that this rank sends to others in a step."""
        total = 0
        for bucket in self.buckets:
            for held_by_peer in (bucket.to_owners, bucket.from_holders)[: 1 + self.returns]:
                pairs = zip(self.peers, held_by_peer, strict=True)
                total += sum(count_elements(held) for peer, held in pairs if peer != self.rank)
            total += self.returns * (len(self.copies) - 1) * bucket.num_by_replica
        return total

    def num_elements(self, matrices: Sequence[Matrix]) -> dict[str, int]:
        """Elements of the memory that the largest bucket needs, by its use."""
        buckets = self.buckets
        shapes = [[matrices[i].shape for i in own.owned] for own in (*self.local, *buckets)]
        arriving = [sum(map(count_elements, bucket.from_holders)) for bucket in buckets]
        sizes_by_use = {
            "wholes": [sum(map(space_of, own)) for own in shapes],
            "outgoing": [sum(map(count_elements, bucket.to_owners)) for bucket in buckets],
            "arriving": arriving,
            "leaving": arriving if self.returns else [],
            "incoming": [len(own.by_replica) * own.num_by_replica for own in buckets],
        }
        return {use: max(sizes, default=0) for use, sizes in sizes_by_use.items()}


def plan_exchange(
    matrices: Sequence[Matrix],
    owners: Owners,
    replicas: Replicas,
    *,
    rank: int,
    peers: Sequence[int],
    copies: Sequence[int],
    itemsize: int,
    bucket_bytes: int,
    returns: bool = True,
) -> ExchangePlan:
    """Plan the exchange of matrices that have the same replicas.

    Args:
        matrices: All matrices, which ``owners`` indexes.
        owners: Owners, in the same order on every rank.
        replicas: Replicas of each of these matrices.
        rank: Rank whose view to plan.
        peers: Ranks of all replicas, in the order of their process group.
        copies: Ranks that `copies_of` names, in the order of their process group.
        itemsize: Bytes of an element on the wire.
        bucket_bytes: Most bytes that one owner gathers in one bucket; with r replicas an r-th, as a
            rank receives the results of all of them.
        returns: Whether owners send results back; not where matrices are only measured.
    """
    local = {
        i: owner for i, owner in owners.items() if matrices[i].regions_by_rank.keys() == {owner}
    }
    own = [i for i, owner in local.items() if owner == rank]
    moving = [i for i in owners if i not in local]
    most = bucket_bytes // itemsize // len(replicas)
    # For each peer, the rank of its replica with this rank's shards; for its own, this rank.
    copy_by_rank = {
        member: copy for copy in copies for home in replicas if copy in home for member in home
    }

    def held(holder: int, indices: Iterable[int]) -> tuple[Held, ...]:
        """Regions of some matrices that a rank holds."""
        return tuple(
            (index, region)
            for index in indices
            for region in matrices[index].regions_by_rank.get(holder, ())
        )

    def plan_bucket(indices: Sequence[int]) -> BucketPlan:
        by_owner: dict[int, list[int]] = {peer: [] for peer in peers}
        for index in indices:
            by_owner[owners[index]].append(index)
        by_copy: dict[int, list[int]] = {copy: [] for copy in copies}
        for peer, owned in by_owner.items():
            by_copy[copy_by_rank[peer]] += owned
        is_home = [copy_by_rank[peer] == rank for peer in peers]
        pairs = list(zip(peers, is_home, strict=True))
        by_replica = tuple(held(rank, made) for made in by_copy.values() if returns)
        return BucketPlan(
            owned=tuple(by_owner[rank]),
            to_owners=tuple(held(rank, by_owner[peer] if home else ()) for peer, home in pairs),
            from_holders=tuple(held(peer, by_owner[rank] if home else ()) for peer, home in pairs),
            by_replica=by_replica,
            num_by_replica=max(map(count_elements, by_replica), default=0),
            place=list(copies).index(rank),
        )

    return ExchangePlan(
        rank=rank,
        peers=tuple(peers),
        copies=tuple(copies),
        buckets=tuple(map(plan_bucket, _group(moving, owners, matrices, most))),
        local=tuple(map(plan_bucket, _group(own, owners, matrices, most))),
        returns=returns,
    )


def _group(
    indices: Sequence[int], owners: Owners, matrices: Sequence[Matrix], most_elements: int
) -> list[list[int]]:
    """Cut matrices into buckets, in which no owner has more elements than this, or one matrix."""
    buckets: dict[int, list[int]] = defaultdict(list)
    # Each owner has a bucket that it fills, and a number of elements in it.
    bucket_by_owner, filled_by_owner = Counter[int](), Counter[int]()
    for index in indices:
        owner, size = owners[index], matrices[index].num_elements
        filled = filled_by_owner[owner]
        if filled and filled + size > most_elements:
            bucket_by_owner[owner] += 1
            filled = 0
        filled_by_owner[owner] = filled + size
        buckets[bucket_by_owner[owner]].append(index)
    return [buckets[number] for number in sorted(buckets)]


def count_elements(held: Sequence[Held]) -> int:
    """Elements of all regions together."""
    return sum(region.num_elements for _, region in held)


def space_of(shape: tuple[int, int]) -> int:
    """Elements that a whole matrix takes in memory, padded."""
    return -(-math.prod(shape) // _ALIGNMENT) * _ALIGNMENT
