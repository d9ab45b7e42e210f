"""What an exchange sends, counted three ways that must agree: by formula, by pair, by plan.

Elements, not bytes.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

import torch

from amo_dist.distributed.layout import Matrix
from amo_dist.distributed.plan import ExchangePlan, Job, count_elements

Pair = tuple[int, int]
"""Global ranks: source and destination."""


@dataclasses.dataclass(frozen=True, slots=True)
class Volume:
    """Elements on their way in one step.

    Attributes:
        gathered: To owners.
        delivered: From owners.
    """

    gathered: int = 0
    delivered: int = 0

    def __add__(self, other: Volume) -> Volume:
        return Volume(self.gathered + other.gathered, self.delivered + other.delivered)

    @property
    def elements(self) -> int:
        """All of them."""
        return self.gathered + self.delivered


def predict(matrices: Sequence[Matrix], jobs: Sequence[Job]) -> Volume:
    """What all ranks together send, in closed form.

    An owner gathers a matrix, less what it holds of its own replica, and
    delivers it once to each replica that it serves, less the same.

    Args:
        matrices: Jobs index them.
        jobs: Of any ranks.
    """
    total = Volume()
    for job in jobs:
        matrix = matrices[job.matrix]
        kept, size = matrix.num_held(job.owner), matrix.num_elements
        served = sum(replica[0] in job.targets for replica in matrix.replicas)
        total += Volume(gathered=size - kept, delivered=served * size - kept)
    return total


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


def sent_by_pair(
    matrices: Sequence[Matrix], jobs: Sequence[Job], num_ranks: int
) -> dict[Pair, Volume]:
    """What each rank sends to each other rank.

    Args:
        matrices: Jobs index them.
        jobs: Of any ranks below ``num_ranks``.
        num_ranks: Size of the world.

    Returns:
        By ``(source, destination)``; pairs that exchange nothing are absent.
    """
    sent: dict[Pair, Volume] = defaultdict(Volume)
    for owner, counts in sent_by_owner(matrices, jobs, num_ranks).items():
        for rank, (gathered, delivered) in enumerate(counts.T.tolist()):
            if gathered:
                sent[rank, owner] += Volume(gathered=gathered)
            if delivered:
                sent[owner, rank] += Volume(delivered=delivered)
    return dict(sent)


def sent_by_plan(plan: ExchangePlan) -> dict[int, Volume]:
    """What the rank of a plan sends to each peer, from the plan's buckets.

    Returns:
        By peer; those that get nothing are absent.
    """
    totals: dict[int, Volume] = defaultdict(Volume)
    for bucket in plan.buckets:
        for place, peer in enumerate(plan.peers):
            totals[peer] += Volume(
                gathered=count_elements(bucket.to_owners[place]),
                delivered=count_elements(bucket.to_holders[place]),
            )
    totals.pop(plan.rank, None)  # nothing travels
    return {peer: volume for peer, volume in totals.items() if volume.elements}
