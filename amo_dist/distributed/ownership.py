"""Who orthogonalizes which matrix: pure and deterministic, the same on every rank.

Ownership exists for the length of one step; no state moves with it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

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
        targets: Ranks that get their pieces of the result from the owner.
        reports: True for exactly one job of each matrix: its owner reports what it observed.
        forwards: By target, the ranks with the same pieces that get theirs from it.
    """

    matrix: int
    owner: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    reports: bool
    forwards: Mapping[int, tuple[int, ...]] = dataclasses.field(default_factory=dict, hash=False)


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
    # Matrices of one shape and layout share their pieces: of a thousand ranks they are cut once.
    alike = {id(matrix.pieces_by_rank): matrix for matrix in matrices}
    known = {key: _slots(matrix, owners) for key, matrix in alike.items()}
    slots = [known[id(matrix.pieces_by_rank)] for matrix in matrices]
    found: list[Job] = []
    for indices in by_ranks.values():
        dealt = _jobs(_round_robin(indices, slots), matrices, owners)
        if ownership == "balanced":
            # Matrices without a choice come first: the others are dealt around them.
            order = sorted(indices, key=lambda i: (len(slots[i]) > 1, -costs[i], matrices[i].name))
            longest_first = _jobs(_least_loaded(order, slots, costs), matrices, owners)
            dealt = min(
                dealt, longest_first, key=lambda jobs: max(load_by_rank(jobs, costs).values())
            )
        found += dealt
    return tuple(sorted(found, key=lambda job: job.matrix))


def load_by_rank(jobs: Sequence[Job], costs: Sequence[float]) -> dict[int, float]:
    """Summed cost of the jobs of each rank that owns one."""
    loads: dict[int, float] = defaultdict(float)
    for job in jobs:
        loads[job.owner] += costs[job.matrix]
    return dict(loads)


def imbalance(jobs: Sequence[Job], costs: Sequence[float], num_ranks: int) -> float:
    """The greatest load of a rank over the mean of all; 1 where there is nothing to do."""
    loads = load_by_rank(jobs, costs).values()
    return max(loads) * num_ranks / sum(loads) if sum(loads) else 1.0


def _slots(matrix: MatrixLayout, owners: str) -> tuple[_Slot, ...]:
    """Candidates to own ``matrix``; those that hold it whole, where there are any."""
    columns = [matrix.ranks] if owners == "mesh" else matrix.replicas
    slots = tuple(zip(*columns, strict=True))
    whole = {rank for rank in matrix.ranks if matrix.held_by(rank) == matrix.num_elements}
    return tuple(slot for slot in slots if whole.issuperset(slot)) or slots


def _round_robin(
    indices: Sequence[int], slots: Sequence[tuple[_Slot, ...]]
) -> Iterator[tuple[int, _Slot]]:
    """Candidates in turn, of each list of candidates by itself."""
    turns: dict[tuple[_Slot, ...], Iterator[_Slot]] = {}
    for index in indices:
        yield index, next(turns.setdefault(slots[index], itertools.cycle(slots[index])))


def _least_loaded(
    order: Sequence[int], slots: Sequence[tuple[_Slot, ...]], costs: Sequence[float]
) -> Iterator[tuple[int, _Slot]]:
    """For each matrix in turn the earliest of its candidates with the least load by then."""
    ranks = {each: torch.tensor(each, device="cpu") for each in {*slots}}
    size = 1 + max(int(some.max()) for some in ranks.values())
    loads = torch.zeros(size, dtype=torch.float64, device="cpu")
    for index in order:
        of_slots = loads[ranks[slots[index]]].amax(dim=1)
        slot = slots[index][int(of_slots.argmin())]
        loads[list(slot)] += costs[index]
        yield index, slot


def _jobs(
    chosen: Iterable[tuple[int, _Slot]], matrices: Sequence[MatrixLayout], owners: str
) -> list[Job]:
    """A job for each owner of each matrix, in the order of the matrices."""
    jobs: list[Job] = []
    for index, slot in sorted(chosen):
        matrix = matrices[index]
        for owner in slot:
            sources = next(replica for replica in matrix.replicas if owner in replica)
            targets = matrix.ranks if owners == "mesh" else sources
            jobs.append(Job(index, owner, sources, targets, reports=owner == slot[0]))
    return jobs
