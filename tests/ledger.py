"""What an exchange sends, by formula and by pair of ranks; plans count the same.

Elements, not bytes.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

from amo_dist.distributed.layout import Matrix
from amo_dist.distributed.plan import Job

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
    for job in jobs:
        matrix, owner = matrices[job.matrix], job.owner
        for rank in range(num_ranks):
            held = 0 if rank == owner else matrix.num_held(rank)
            if held and rank in job.sources:
                sent[rank, owner] += Volume(gathered=held)
            if held and rank in job.targets:
                sent[owner, rank] += Volume(delivered=held)
    return dict(sent)
