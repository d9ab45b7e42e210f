"""What an exchange sends, counted three ways that must agree: by formula, by pair, by plan.

Elements, not bytes, as in `amo_dist.tools.ledger`.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence

from amo_dist.distributed.layout import MatrixLayout
from amo_dist.distributed.ownership import Job
from amo_dist.distributed.plan import ExchangePlan, count_elements
from amo_dist.tools.ledger import sent_by_owner, sent_by_relay

Pair = tuple[int, int]
"""Global ranks: source and destination."""


@dataclasses.dataclass(frozen=True, slots=True)
class Volume:
    """Elements on their way in one step.

    Attributes:
        gathered: To owners, in the dtype of the wire.
        gathered_wide: To owners of observed matrices, in the dtype of the momentum.
        delivered: From owners and relays, in the dtype of the wire.
    """

    gathered: int = 0
    gathered_wide: int = 0
    delivered: int = 0

    def __add__(self, other: Volume) -> Volume:
        return Volume(
            self.gathered + other.gathered,
            self.gathered_wide + other.gathered_wide,
            self.delivered + other.delivered,
        )

    @property
    def elements(self) -> int:
        """All of them."""
        return self.gathered + self.gathered_wide + self.delivered

    def num_bytes(self, wire: int, wide: int) -> int:
        """Bytes, for an element of ``wire`` and one of ``wide`` bytes."""
        return wire * (self.gathered + self.delivered) + wide * self.gathered_wide


def predict(
    matrices: Sequence[MatrixLayout], jobs: Sequence[Job], wide: frozenset[int] = frozenset()
) -> Volume:
    """What all ranks together send, in closed form.

    An owner gathers a matrix, or its slab of one, less what it holds of its own replica, and
    delivers it once to each replica that it serves, less the same.

    Args:
        matrices: Jobs index them.
        jobs: Of any ranks, before relays: these add nothing to what all send.
        wide: Matrices that are observed.
    """
    total = Volume()
    for job in jobs:
        matrix = matrices[job.matrix]
        kept = matrix.held_by(job.owner, job.box)
        size = math.prod(stop - start for start, stop in job.box)
        served = sum(replica[0] in job.targets for replica in matrix.replicas)
        gathered = size - kept
        is_wide = job.matrix in wide
        total += Volume(
            gathered=0 if is_wide else gathered,
            gathered_wide=gathered if is_wide else 0,
            delivered=served * size - kept,
        )
    return total


def sent_by_pair(
    matrices: Sequence[MatrixLayout],
    jobs: Sequence[Job],
    num_ranks: int,
    wide: frozenset[int] = frozenset(),
) -> dict[Pair, Volume]:
    """What each rank sends to each other rank.

    Args:
        matrices: Jobs index them.
        jobs: Of any ranks below ``num_ranks``.
        num_ranks: Size of the world.
        wide: Matrices that are observed.

    Returns:
        By ``(source, destination)``; pairs that exchange nothing are absent.
    """
    sent: dict[Pair, Volume] = defaultdict(Volume)
    for is_wide in (False, True):
        some = [job for job in jobs if (job.matrix in wide) == is_wide]
        for owner, counts in sent_by_owner(matrices, some, num_ranks).items():
            for rank, (gathered, delivered) in enumerate(counts.T.tolist()):
                if gathered:
                    sent[rank, owner] += Volume(0, gathered) if is_wide else Volume(gathered)
                if delivered:
                    sent[owner, rank] += Volume(delivered=delivered)
    for pair, forwarded in sent_by_relay(matrices, jobs).items():
        sent[pair] += Volume(delivered=forwarded)
    return dict(sent)


def sent_by_plan(plan: ExchangePlan) -> dict[int, Volume]:
    """What the rank of a plan sends to each peer, from the plan's buckets.

    Returns:
        By peer; those that get nothing are absent.
    """
    totals: dict[int, Volume] = defaultdict(Volume)
    for bucket in plan.buckets:
        for place, peer in enumerate(plan.peers):
            gathered = count_elements(bucket.gather.send[place])
            forwarded = count_elements(bucket.forward.send[place]) if bucket.forward else 0
            totals[peer] += Volume(
                gathered=0 if bucket.wide else gathered,
                gathered_wide=gathered if bucket.wide else 0,
                delivered=count_elements(bucket.deliver.send[place]) + forwarded,
            )
    return {peer: volume for peer, volume in totals.items() if volume.elements}
