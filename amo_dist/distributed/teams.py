"""How ranks share one matrix: who holds which slab of it, the same on every rank.

Each member of a team holds a slab: an interval of the long side, across the whole short side. A
step of the computation adds up the slabs' Gram matrices over the team, squares the sum on each
member, and multiplies the slab by a polynomial of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import torch.distributed as dist
from torch import Tensor

from amo_dist.config import Box

FLOPS_PER_BYTE = 1500
"""Flops that a rank could compute in the time in which it sends a byte within its node. An H100 SXM
has 989 TFLOP/s of dense bfloat16 and 450 GB/s of NVLink each way (NVIDIA's data sheet), of which
large products reach about two thirds and large all-reduces about nine tenths."""

Shape = tuple[int, int]


def slabs(shape: Shape, size: int) -> tuple[Box, ...]:
    """Cut a matrix along its long side, as evenly as it goes.

    Args:
        shape: ``(m, n)``; of a square the columns count as the long side.
        size: Members of the team, no more than the long side has elements.

    Returns:
        The region of each member: ``((first row, end), (first column, end))``.
    """
    m, n = shape
    edges = [max(m, n) * number // size for number in range(size + 1)]
    ends = itertools.pairwise(edges)
    return tuple((edge, (0, n)) if m > n else ((0, m), edge) for edge in ends)


def share_of(shape: Shape, box: Box) -> float:
    """Flops of a slab over those of the whole matrix; see `member_costs`."""
    (top, bottom), (left, right) = box
    width = bottom - top if shape[0] > shape[1] else right - left
    return (2 * width + min(shape)) / (2 * max(shape) + min(shape))


def member_costs(shape: Shape, cost: float, largest: int, itemsize: int) -> dict[int, float]:
    """Flops of the busiest member of a team, bytes that it sends counted as flops, by team size.

    A step takes ``2 * min^2 * (2 * width + min)`` flops of a slab, and of the Gram matrix a ring
    sends ``2 * (size - 1) / size``.

    Args:
        shape: ``(m, n)``.
        cost: Flops of the whole matrix, in all steps.
        largest: Most members.
        itemsize: Bytes of an element of the Gram matrix.

    Returns:
        For 1 and the powers of two up to ``largest`` and the long side.
    """
    short, long = sorted(shape)
    costs, size = {1: cost}, 2
    while size <= min(largest, long):
        width, sent = -(-long // size), (size - 1) / size * itemsize * FLOPS_PER_BYTE
        costs[size] = cost * (2 * width + short + sent) / (2 * long + short)
        size *= 2
    return costs


def choices(costs: Mapping[int, Mapping[int, float]]) -> Iterator[dict[int, int]]:
    """For each bound on the cost of a member: the smallest team of each matrix that keeps it.

    If none keeps it, the team with the least cost.

    Args:
        costs: Cost of a member by the team's size, for each matrix.

    Yields:
        Team sizes by matrix.
    """
    known: set[tuple[int, ...]] = set()
    for bound in sorted({cost for by_size in costs.values() for cost in by_size.values()}):
        sizes = {
            index: min((max(cost, bound), size) for size, cost in by_size.items())[1]
            for index, by_size in costs.items()
        }
        if tuple(sizes.values()) not in known:
            known.add(tuple(sizes.values()))
            yield sizes


class TeamGroup:
    """Collectives of a team's members while they compute; they work in place.

    They hold back the current stream, not the host.

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
