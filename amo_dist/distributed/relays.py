"""Results cross to each other node once: one holder there, the relay, forwards them to the rest."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from amo_dist.config import Box
from amo_dist.distributed.layout import MatrixLayout, Piece
from amo_dist.distributed.ownership import Job

_Holders: TypeAlias = tuple[int, int, list[int]]
"""A node, a number of elements, and the ranks there that all hold the same ones."""


def relay(
    matrices: Sequence[MatrixLayout], jobs: Sequence[Job], node_by_rank: Mapping[int, int]
) -> tuple[Job, ...]:
    """Deliver by way of relays wherever that saves bytes across nodes.

    On the owner's node nothing changes. Of the targets on another node that hold the same pieces,
    as replicas do, the owner serves one, and this one the others: the one that by then forwards
    the fewest elements for its set of ranks. Where each piece has one holder on a node, nothing
    changes.

    Args:
        matrices: Jobs index them.
        jobs: In the same order on every rank.
        node_by_rank: Of each rank, any number that ranks of its node share.

    Returns:
        The jobs; targets that a relay serves stand in ``forwards`` instead.
    """
    known: dict[tuple[int, int, Box], list[_Holders]] = {}
    # Apart for each set: a rank must find the same relays as ranks that know of one set alone.
    loads: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    relayed: list[Job] = []
    for job in jobs:
        matrix = matrices[job.matrix]
        # By identity: matrices of one shape and layout share these objects.
        key = id(matrix.pieces_by_rank), id(job.targets), job.box
        if key not in known:
            known[key] = _alike(matrix, job, node_by_rank)
        load, here = loads[matrix.ranks], node_by_rank[job.owner]
        targets: list[int] = []
        forwards: dict[int, tuple[int, ...]] = {}
        for node, size, holders in known[key]:
            if node == here or len(holders) == 1:
                targets += holders
                continue
            first = min(holders, key=load.__getitem__)
            targets.append(first)
            forwards[first] = tuple(rank for rank in holders if rank != first)
            load[first] += size * len(forwards[first])
        if forwards:
            job = dataclasses.replace(job, targets=tuple(targets), forwards=forwards)
        relayed.append(job)
    return tuple(relayed)


def _alike(matrix: MatrixLayout, job: Job, node_by_rank: Mapping[int, int]) -> list[_Holders]:
    """The targets, by node and by what they hold of the owner's share."""
    found: dict[tuple[int, tuple[Piece, ...]], list[int]] = defaultdict(list)
    for rank in job.targets:
        if pieces := matrix.pieces_of(rank, job.box):
            found[node_by_rank[rank], pieces].append(rank)
    return [(node, matrix.held_by(ranks[0], job.box), ranks) for (node, _), ranks in found.items()]
