"""What the exchange of a step sends, from layouts and owners alone.

Elements, not bytes: a matrix travels to its owner in the dtype of the wire or, when it is observed,
of the momentum, and back in that of the wire.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from amo_dist.distributed.layout import MatrixLayout
from amo_dist.distributed.ownership import Job


def sent_by_owner(
    matrices: Sequence[MatrixLayout],
    jobs: Sequence[Job],
    num_ranks: int,
    wide: frozenset[int] = frozenset(),
) -> dict[int, torch.Tensor]:
    """What each owner gathers from, and delivers to, each rank, from layouts and owners alone.

    Args:
        matrices: Jobs index them.
        jobs: Of any ranks below ``num_ranks``.
        num_ranks: Size of the world.
        wide: Matrices that are observed.

    Returns:
        By owner, elements in an int64 tensor ``(3, num_ranks)``: gathered from each rank, gathered
        wide from it, and delivered to it.
    """
    held_by_layout: dict[int, torch.Tensor] = {}
    index_by_ranks: dict[int, torch.Tensor] = {}
    counts: dict[int, torch.Tensor] = {}
    for job in jobs:
        # Keyed by identity: matrices of one shape and layout share these objects.
        matrix = matrices[job.matrix]
        held = held_by_layout.get(id(matrix.pieces_by_rank))
        if held is None:
            held = torch.zeros(num_ranks, dtype=torch.int64)
            for rank in matrix.pieces_by_rank:
                held[rank] = matrix.held_by(rank)
            held_by_layout[id(matrix.pieces_by_rank)] = held
        if job.owner not in counts:
            counts[job.owner] = torch.zeros((3, num_ranks), dtype=torch.int64)
        for row, ranks in ((1 if job.matrix in wide else 0, job.sources), (2, job.targets)):
            if id(ranks) not in index_by_ranks:
                index_by_ranks[id(ranks)] = torch.tensor(ranks)
            index = index_by_ranks[id(ranks)]
            counts[job.owner][row].index_add_(0, index, held[index])
    for owner, found in counts.items():
        found[:, owner] = 0  # what the owner holds itself goes nowhere
    return counts


def sent_by_rank(
    matrices: Sequence[MatrixLayout], jobs: Sequence[Job], num_ranks: int, ranks_per_node: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What each rank sends while nothing is observed.

    Args:
        matrices: Jobs index them.
        jobs: Of any ranks below ``num_ranks``.
        num_ranks: Size of the world.
        ranks_per_node: Consecutive ranks of one node.

    Returns:
        Elements sent to ranks of the same node, and to other nodes: two int64 tensors
        ``(num_ranks,)``.
    """
    within, across = (torch.zeros(num_ranks, dtype=torch.int64) for _ in range(2))
    node = torch.arange(num_ranks) // ranks_per_node
    for owner, (gathered, _, delivered) in sent_by_owner(matrices, jobs, num_ranks).items():
        is_across = node != node[owner]
        for sent, is_counted in ((within, ~is_across), (across, is_across)):
            sent += gathered * is_counted
            sent[owner] += (delivered * is_counted).sum()
    return within, across
