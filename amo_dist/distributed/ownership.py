"""Owner of each matrix: pure and deterministic, the same on every rank.

Ownership exists for the length of one step; no state moves with it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from amo_dist.distributed.layout import Matrix


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
    ownership: str = "round_robin",
    first_owner: int = 0,
) -> tuple[Job, ...]:
    """Assign matrices to owner ranks, separately for each set of ranks that shares some.

    A rank that belongs to several sets must compute the same owners as ranks that know one set
    alone, so no set looks at the load of another.

    A matrix that one rank holds whole, such as an expert sharded on its first dim, goes to such a
    rank, and nothing need be gathered.

    Args:
        matrices: Matrices, in the order in which round robin assigns them.
        costs: Flops of each matrix, with its schedule of this moment.
        ownership: ``round_robin``, or ``balanced``: the longest job first to the rank with the
            least work, ties by name, unless round robin's greatest load is as low; loads are those
            of the set.
        first_owner: Number of the candidate at which round robin begins, counted around.

    Returns:
        A job for each matrix, in their order.
    """
    by_ranks: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, matrix in enumerate(matrices):
        by_ranks[tuple(sorted(matrix.ranks))].append(index)
    # Matrices of one layout share their regions: on a thousand ranks candidates are sought once.
    by_layout = {id(matrix.regions_by_rank): matrix for matrix in matrices}
    known = {key: _candidates(matrix) for key, matrix in by_layout.items()}
    candidates = [known[id(matrix.regions_by_rank)] for matrix in matrices]
    owners: dict[int, int] = {}
    for indices in by_ranks.values():
        choice = _round_robin(indices, candidates, first_owner)
        if ownership == "balanced":
            # Matrices with one candidate come first: the others fill up around them.
            order = sorted(
                indices, key=lambda i: (len(candidates[i]) > 1, -costs[i], matrices[i].name)
            )
            balanced = _least_loaded(order, candidates, costs)
            choice = min(choice, balanced, key=lambda owners: _greatest_load(owners, costs))
        owners |= choice
    return tuple(_job(index, owners[index], matrix) for index, matrix in enumerate(matrices))


def _job(index: int, owner: int, matrix: Matrix) -> Job:
    sources = next(replica for replica in matrix.replicas if owner in replica)
    return Job(index, owner, sources, matrix.ranks)


def load_by_rank(jobs: Sequence[Job], costs: Sequence[float]) -> dict[int, float]:
    """Summed cost of the jobs of each rank that owns any."""
    loads: dict[int, float] = defaultdict(float)
    for job in jobs:
        loads[job.owner] += costs[job.matrix]
    return dict(loads)


def _candidates(matrix: Matrix) -> tuple[int, ...]:
    """Ranks that may own a matrix: those that hold it whole if there are any, else all."""
    whole = (rank for rank in matrix.ranks if matrix.num_held(rank) == matrix.num_elements)
    return tuple(whole) or tuple(matrix.ranks)


def _greatest_load(owners: Mapping[int, int], costs: Sequence[float]) -> float:
    loads: dict[int, float] = defaultdict(float)
    for index, owner in owners.items():
        loads[owner] += costs[index]
    return max(loads.values())


def _round_robin(
    indices: Sequence[int], candidates: Sequence[tuple[int, ...]], first_owner: int
) -> dict[int, int]:
    """Owner by matrix: candidates in turn; each list of candidates has a turn of its own."""
    owners: dict[int, int] = {}
    turns = Counter[tuple[int, ...]]()
    for index in indices:
        ranks = candidates[index]
        owners[index] = ranks[(first_owner + turns[ranks]) % len(ranks)]
        turns[ranks] += 1
    return owners


def _least_loaded(
    order: Sequence[int], candidates: Sequence[tuple[int, ...]], costs: Sequence[float]
) -> dict[int, int]:
    """Owner by matrix: for each in turn the earliest candidate with the least load so far."""
    owners: dict[int, int] = {}
    loads: dict[int, float] = defaultdict(float)
    for index in order:
        owners[index] = min(candidates[index], key=loads.__getitem__)
        loads[owners[index]] += costs[index]
    return owners
