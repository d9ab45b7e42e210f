"""Who orthogonalizes which matrix: pure and deterministic, the same on every rank.

Ownership exists for the length of one step; no state moves with it.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from amo_dist.distributed.layout import MatrixLayout

_Slot = tuple[int, ...]
"""The ranks that own a matrix together: one, or one of each replica."""


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One matrix, orthogonalized by one rank.

    Attributes:
        matrix: Index of the matrix.
        owner: Rank that gathers it, orthogonalizes it and sends the pieces back.
        sources: Ranks whose pieces together make up the matrix: the owner's replica.
        targets: Ranks that get their pieces of the result.
        reports: True for exactly one job of each matrix: its owner reports what it observed.
    """

    matrix: int
    owner: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    reports: bool


def assign(
    matrices: Sequence[MatrixLayout],
    costs: Sequence[float],
    *,
    ownership: str = "round_robin",
    owners: str = "mesh",
) -> tuple[Job, ...]:
    """Deal matrices to ranks, apart for each set of ranks that shares some.

    Each set is dealt by itself: a rank that belongs to several must find the same owners as ranks
    that know of one set alone.

    A matrix that some rank holds whole, such as an expert sharded on its first dim, goes to a
    rank that does, so that nothing need be gathered.

    Args:
        matrices: In the order in which round robin deals them.
        costs: Flops of each, with the schedule it has now.
        ownership: ``round_robin``, or ``balanced``: longest job first to the rank with the least
            work, ties by name, unless round robin's greatest load is as low; loads are those of
            the set.
        owners: ``mesh``: one owner for each matrix, who delivers to every replica; or
            ``replica``: one owner in each replica, so that no byte crosses replicas and each
            replica repeats the work.
    """
    by_ranks: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, matrix in enumerate(matrices):
        by_ranks[tuple(sorted(matrix.ranks))].append(index)
    chosen: dict[int, _Slot] = {}
    for indices in by_ranks.values():
        shared = [matrices[index] for index in indices]
        found = _choose(shared, [costs[index] for index in indices], ownership, owners)
        chosen.update(zip(indices, found, strict=True))
    return tuple(
        job
        for index, matrix in enumerate(matrices)
        for job in _jobs(index, matrix, chosen[index], owners)
    )


def load_by_rank(jobs: Sequence[Job], costs: Sequence[float]) -> dict[int, float]:
    """Summed cost of the jobs of each rank that owns one."""
    loads: dict[int, float] = defaultdict(float)
    for job in jobs:
        loads[job.owner] += costs[job.matrix]
    return dict(loads)


def _choose(
    matrices: Sequence[MatrixLayout], costs: Sequence[float], ownership: str, owners: str
) -> list[_Slot]:
    """The owners of each matrix of one set of ranks."""
    # Matrices of one shape and layout share their counts: of a thousand ranks they are cut once.
    alike = {id(matrix.elements_by_rank): matrix for matrix in matrices}
    known = {key: _slots(matrix, owners) for key, matrix in alike.items()}
    slots = [known[id(matrix.elements_by_rank)] for matrix in matrices]
    dealt = _round_robin(slots)
    if ownership == "balanced":
        longest_first = _longest_first(matrices, slots, costs)
        if _greatest_load(longest_first, costs) < _greatest_load(dealt, costs):
            return longest_first
    return dealt


def _slots(matrix: MatrixLayout, owners: str) -> list[_Slot]:
    """Candidates to own ``matrix``; those that hold it whole, where there are any."""
    if owners == "mesh":
        slots: list[_Slot] = [(rank,) for rank in matrix.ranks]
    else:
        slots = list(zip(*matrix.replicas, strict=True))
    whole = [
        slot for slot in slots if all(matrix.held_by(rank) == matrix.num_elements for rank in slot)
    ]
    return whole or slots


def _round_robin(slots: Sequence[Sequence[_Slot]]) -> list[_Slot]:
    """Candidates in turn, of each list of candidates by itself."""
    turns: dict[tuple[_Slot, ...], Iterator[_Slot]] = {}
    return [next(turns.setdefault(tuple(some), itertools.cycle(some))) for some in slots]


def _longest_first(
    matrices: Sequence[MatrixLayout], slots: Sequence[Sequence[_Slot]], costs: Sequence[float]
) -> list[_Slot]:
    # Matrices without a choice come first: the others are dealt around them.
    order = sorted(
        range(len(matrices)),
        key=lambda index: (len(slots[index]) > 1, -costs[index], matrices[index].name),
    )
    loads: dict[int, float] = defaultdict(float)
    heaps: dict[tuple[_Slot, ...], list[tuple[float, int]]] = {}
    chosen: dict[int, _Slot] = {}
    for index in order:
        candidates = tuple(slots[index])
        heap = heaps.setdefault(candidates, [(0.0, place) for place in range(len(candidates))])
        slot = _least_loaded(candidates, heap, loads)
        chosen[index] = slot
        for rank in slot:
            loads[rank] += costs[index]
    return [chosen[index] for index in range(len(matrices))]


def _least_loaded(
    candidates: Sequence[_Slot], heap: list[tuple[float, int]], loads: Mapping[int, float]
) -> _Slot:
    """The earliest of the candidates with the least load.

    Loads only grow, so that an entry of the heap is a lower bound: one that is still true at the
    top is the least.
    """
    while True:
        bound, place = heap[0]
        load = max(loads[rank] for rank in candidates[place])
        if load == bound:
            return candidates[place]
        heapq.heapreplace(heap, (load, place))


def _greatest_load(chosen: Sequence[_Slot], costs: Sequence[float]) -> float:
    loads: dict[int, float] = defaultdict(float)
    for slot, cost in zip(chosen, costs, strict=True):
        for rank in slot:
            loads[rank] += cost
    return max(loads.values(), default=0.0)


def _jobs(index: int, matrix: MatrixLayout, slot: _Slot, owners: str) -> list[Job]:
    jobs: list[Job] = []
    for position, owner in enumerate(slot):
        sources = next(replica for replica in matrix.replicas if owner in replica)
        targets = matrix.ranks if owners == "mesh" else sources
        jobs.append(Job(index, owner, sources, targets, reports=position == 0))
    return jobs
