"""What the members of a team bring together while they compute."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


class TeamGroup:
    """Collectives over a team, in place; they wait as the current stream does, not the host.

    Args:
        group: Process group of the members.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def add(self, values: Tensor) -> None:
        """Elementwise sum over the members."""
        dist.all_reduce(values, group=self._group)

    def take_greatest(self, values: Tensor) -> None:
        """Elementwise maximum over the members; one that is NaN may be passed over."""
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._group)
