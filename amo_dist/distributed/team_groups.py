"""What the members of a team bring together while they compute."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping

import torch.distributed as dist
from torch import Tensor

from amo_dist.distributed.agreement import gather_json


class TeamGroup:
    """Collectives over a team, in place; they wait as the current stream does, not the host.

    Args:
        group: Process group of the members, for nothing else: what is under way in another does
            not hold these up.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def add(self, values: Tensor) -> None:
        """Elementwise sum over the members."""
        dist.all_reduce(values, group=self._group)

    def take_greatest(self, values: Tensor) -> None:
        """Elementwise maximum over the members; one that is NaN may be passed over."""
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._group)


def add_groups(
    known: MutableMapping[tuple[int, ...], TeamGroup],
    teams: Iterable[tuple[int, ...]],
    world: dist.ProcessGroup | None,
) -> None:
    """Make the groups of new teams; a collective over the world.

    All ranks make all that any misses: see `amo_dist.engine.world`.

    Args:
        known: Teams of this rank; modified.
        teams: Those of this rank that must be known.
        world: Their ranks and all others.
    """
    missing = sorted({*teams} - known.keys())
    for ranks in sorted({tuple(ranks) for some in gather_json(missing, world) for ranks in some}):
        group = dist.new_group(list(ranks))
        if dist.get_rank() in ranks:
            known[ranks] = TeamGroup(group)
