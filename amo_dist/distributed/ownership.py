"""Who orthogonalizes which matrix: pure and deterministic, the same on every rank.

Ownership exists for the length of one step; no state moves with it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from amo_dist.config import Box
from amo_dist.distributed.layout import Matrix
from amo_dist.distributed.teams import choices, member_costs, share_of, slabs

_Block = tuple[int, ...]
"""The owner of a matrix, or the members of its team."""


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One matrix, or a slab of it, orthogonalized by one rank.

    Attributes:
        matrix: Index of the matrix.
        owner: Rank that gathers the matrix, orthogonalizes it and sends the results back.
        sources: Ranks that together hold the matrix once: the owner's replica.
        targets: Ranks that get results from the owner: those of all replicas.
        team: Ranks that share the matrix, the owner among them, in the order of their slabs; empty
            if the owner has all of it.
        box: Box of the matrix that the owner orthogonalizes.
        share: Flops of the owner over those of the whole matrix.
    """

    matrix: int
    owner: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    team: tuple[int, ...]
    box: Box
    share: float

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the box."""
        (top, bottom), (left, right) = self.box
        return bottom - top, right - left


def assign(
    matrices: Sequence[Matrix],
    costs: Sequence[float],
    *,
    ownership: str = "round_robin",
    max_team: int = 1,
    itemsize: int = 2,
    turn: int = 0,
) -> tuple[Job, ...]:
    """Assign matrices to owner ranks, separately for each set of ranks that shares some.

    A rank that belongs to several sets must compute the same owners as ranks that know one set
    alone, so no set looks at the load of another.

    A matrix that one rank holds whole, such as an expert sharded on its first dim, goes to such a
    rank, and nothing need be gathered.

    With teams, ranks share matrices if that lowers the greatest load, what they send counted.
    Teams are aligned blocks of neighbours in the mesh, so that they lie within a node.

    Args:
        matrices: Matrices, in the order in which round robin assigns them.
        costs: Flops of each matrix, with its schedule of this moment.
        ownership: ``round_robin``, or ``balanced``: the longest job first to the rank with the
            least work, ties by name, unless round robin's greatest load is as low; loads are those
            of the set. Among teams round robin takes the largest first, then the longest job.
        max_team: Most ranks that share a matrix; 1 means no teams.
        itemsize: Bytes of an element of what a team adds up.
        turn: Number of the candidate at which round robin begins, counted around; 0 with teams.
    """
    by_ranks: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, matrix in enumerate(matrices):
        by_ranks[tuple(sorted(matrix.ranks))].append(index)
    # Matrices of one layout share their regions: on a thousand ranks candidates are sought once.
    by_layout = {id(matrix.regions_by_rank): matrix for matrix in matrices}
    known = {key: _candidates(matrix) for key, matrix in by_layout.items()}
    candidates = [known[id(matrix.regions_by_rank)] for matrix in matrices]
    jobs: list[Job] = []
    for indices in by_ranks.values():
        by_size = {
            i: _costs_by_size(matrices[i], costs[i], len(candidates[i]), max_team, itemsize)
            for i in indices
        }
        balances = ownership == "balanced"
        try_sizes = functools.partial(_assign, matrices, candidates, by_size, balances, turn)
        load, blocks = try_sizes(dict.fromkeys(indices, 1))
        for sizes in choices(by_size) if max_team > 1 else ():
            # No assignment has a greatest load below the mean, or below that of one member.
            members = [(size, by_size[index][size]) for index, size in sizes.items()]
            mean = sum(size * cost for size, cost in members) / len(matrices[indices[0]].ranks)
            if max(mean, *(cost for _, cost in members)) < load:
                load, blocks = min((load, blocks), try_sizes(sizes), key=lambda pair: pair[0])
        jobs += _jobs(blocks, matrices)
    return tuple(sorted(jobs, key=lambda job: job.matrix))


def load_by_rank(jobs: Sequence[Job], costs: Sequence[float]) -> dict[int, float]:
    """Summed cost of the jobs of each rank that owns any; what teams send is not counted."""
    loads: dict[int, float] = defaultdict(float)
    for job in jobs:
        loads[job.owner] += costs[job.matrix] * job.share
    return dict(loads)


def _candidates(matrix: Matrix) -> tuple[int, ...]:
    """Ranks that may own a matrix: those that hold it whole if there are any, else all."""
    whole = (rank for rank in matrix.ranks if matrix.num_held(rank) == matrix.num_elements)
    return tuple(whole) or tuple(matrix.ranks)


def _costs_by_size(
    matrix: Matrix, cost: float, num_owners: int, max_team: int, itemsize: int
) -> dict[int, float]:
    """Cost of a member for each size of its team; a matrix that a rank holds whole has none."""
    most = min(max_team, num_owners) if num_owners == len(matrix.ranks) else 1
    return member_costs(matrix.shape, cost, most, itemsize)


def _assign(
    matrices: Sequence[Matrix],
    candidates: Sequence[tuple[int, ...]],
    by_size: Mapping[int, Mapping[int, float]],
    balances: bool,
    turn: int,
    sizes: Mapping[int, int],
) -> tuple[float, list[tuple[int, _Block]]]:
    """The greatest load of a rank, and the owner or the team of each matrix."""
    costs = {index: by_size[index][size] for index, size in sizes.items()}
    order = list(sizes)
    if max(sizes.values()) > 1:  # blocks stay aligned as sizes fall
        order.sort(key=lambda i: (-sizes[i], -costs[i]))
    assignments = [list(_round_robin(order, candidates, sizes, turn))]
    if balances:
        # Matrices with one candidate come first: the others fill up around them.
        order.sort(key=lambda i: (len(candidates[i]) > 1, -costs[i], matrices[i].name))
        assignments.append(list(_least_loaded(order, candidates, costs, sizes)))
    pairs = ((_greatest_load(blocks, costs), blocks) for blocks in assignments)
    return min(pairs, key=lambda pair: pair[0])


def _greatest_load(blocks: Iterable[tuple[int, _Block]], costs: Mapping[int, float]) -> float:
    loads: dict[int, float] = defaultdict(float)
    for index, block in blocks:
        for rank in block:
            loads[rank] += costs[index]
    return max(loads.values())


def _round_robin(
    order: Sequence[int],
    candidates: Sequence[tuple[int, ...]],
    sizes: Mapping[int, int],
    turn: int,
) -> Iterator[tuple[int, _Block]]:
    """Candidates in turn; each list of candidates has a turn of its own."""
    places: dict[tuple[int, ...], int] = {}
    for index in order:
        ranks, size = candidates[index], sizes[index]
        place = places.get(ranks, turn % len(ranks))
        place = place if place + size <= len(ranks) else 0
        places[ranks] = place + size
        yield index, ranks[place : place + size]


def _least_loaded(
    order: Sequence[int],
    candidates: Sequence[tuple[int, ...]],
    costs: Mapping[int, float],
    sizes: Mapping[int, int],
) -> Iterator[tuple[int, _Block]]:
    """For each matrix in turn the earliest of its candidates with the least load so far."""
    tensors = {ranks: torch.tensor(ranks, device="cpu") for ranks in {candidates[i] for i in order}}
    num_ranks = 1 + max(int(ranks.max()) for ranks in tensors.values())
    loads = torch.zeros(num_ranks, dtype=torch.float64, device="cpu")
    for index in order:
        size, ranks = sizes[index], tensors[candidates[index]]
        blocks = ranks[: len(ranks) // size * size].view(-1, size)
        place = size * int(loads[blocks].amax(dim=1).argmin())
        block = candidates[index][place : place + size]
        loads[list(block)] += costs[index]
        yield index, block


def _jobs(chosen: Iterable[tuple[int, _Block]], matrices: Sequence[Matrix]) -> list[Job]:
    """A job for each owner of each matrix, in the order of the matrices."""
    jobs: list[Job] = []
    for index, block in sorted(chosen):
        matrix = matrices[index]
        team = block if len(block) > 1 else ()
        for owner, box in zip(block, slabs(matrix.shape, len(block)), strict=True):
            sources = next(replica for replica in matrix.replicas if owner in replica)
            share = share_of(matrix.shape, box)
            jobs.append(Job(index, owner, sources, matrix.ranks, team, box, share))
    return jobs
