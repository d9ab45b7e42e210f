"""Elements that the exchange of a step sends, from layouts and owners alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from amo_dist.distributed.layout import Matrix
from amo_dist.distributed.plan import Job


def sent_by_owner(
    matrices: Sequence[Matrix], jobs: Sequence[Job], num_ranks: int
) -> dict[int, torch.Tensor]:
    """Count the elements that each owner gathers from, and delivers to, each rank.

    Args:
        matrices: Layouts of the matrices, which jobs index.
        jobs: Jobs of ranks below ``num_ranks``.
        num_ranks: Size of the world.

    Returns:
        int64 tensors ``(2, num_ranks)`` by owner: elements gathered from each rank, and delivered
        to it.
    """
    known: dict[int, torch.Tensor] = {}
    counts: dict[int, torch.Tensor] = defaultdict(
        lambda: torch.zeros((2, num_ranks), dtype=torch.int64)
    )
    for job in jobs:
        held = _held(matrices[job.matrix], num_ranks, known)
        for count, ranks in zip(counts[job.owner], (job.sources, job.targets), strict=True):
            index = torch.tensor(ranks)
            count[index] += held[index]
    for owner, elements in counts.items():
        elements[:, owner] = 0  # the owner's own elements stay
    return counts


def _held(matrix: Matrix, num_ranks: int, known: dict[int, torch.Tensor]) -> torch.Tensor:
    """Count the elements of a matrix that each rank holds: int64, ``(num_ranks,)``."""
    # The key is an identity, because matrices of one shape and layout share this object.
    key = id(matrix.regions_by_rank)
    if key not in known:
        known[key] = torch.tensor([matrix.num_held(rank) for rank in range(num_ranks)])
    return known[key]


def sent_by_rank(
    matrices: Sequence[Matrix], jobs: Sequence[Job], num_ranks: int, ranks_per_node: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Count the elements that each rank sends.

    Args:
        matrices: Layouts of the matrices, which jobs index.
        jobs: Jobs of ranks below ``num_ranks``.
        num_ranks: Size of the world.
        ranks_per_node: Number of consecutive ranks on one node.

    Returns:
        Elements sent to ranks of the same node, and to other nodes: two int64 tensors
        ``(num_ranks,)``.
    """
    within, across = (torch.zeros(num_ranks, dtype=torch.int64) for _ in range(2))
    node = torch.arange(num_ranks) // ranks_per_node
    for owner, (gathered, delivered) in sent_by_owner(matrices, jobs, num_ranks).items():
        for sent, is_counted in ((within, node == node[owner]), (across, node != node[owner])):
            sent += gathered * is_counted
            sent[owner] += (delivered * is_counted).sum()
    return within, across
