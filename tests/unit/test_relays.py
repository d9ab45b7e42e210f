"""Relays: each other node gets a piece once, from the owner; all holders still get it."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amo_dist.distributed.ownership import Job, assign
from amo_dist.distributed.relays import relay
from tests.layouts import Model, build, models
from tests.ledger import predict, sent_by_pair


def dealt(model: Model, owners: str = "mesh") -> tuple[Job, ...]:
    return assign(model.matrices, [1.0] * len(model.matrices), owners=owners)


def by_node(ranks: list[int], size: int) -> dict[int, int]:
    return {rank: rank // size for rank in ranks}


@settings(max_examples=40, deadline=None)
@given(models(max_ranks=24), st.integers(1, 8), st.sampled_from(["mesh", "replica"]))
def test_each_piece_crosses_to_a_node_once_and_reaches_all(
    model: Model, size: int, owners: str
) -> None:
    node = by_node(model.ranks, size)
    before = dealt(model, owners)
    for old, job in zip(before, relay(model.matrices, before, node), strict=True):
        pieces = model.matrices[job.matrix].pieces_by_rank
        others = list(itertools.chain(*job.forwards.values()))
        served = Counter((*job.targets, *others))
        assert {rank for rank in served if rank in pieces} == {
            rank for rank in old.targets if rank in pieces
        }
        assert set(served.values()) == {1}
        for first, some in job.forwards.items():
            assert first in job.targets
            assert all(node[rank] == node[first] != node[job.owner] for rank in some)
            assert all(pieces[rank] == pieces[first] for rank in some)
        crossing = [
            (node[rank], pieces[rank])
            for rank in job.targets
            if rank in pieces and node[rank] != node[job.owner]
        ]
        assert len(crossing) == len(set(crossing))


def test_nodes_that_hold_each_piece_once_leave_the_jobs_alone() -> None:
    model = build("hsdp", torch.arange(8).view(2, 4), [(8, 3)] * 5)
    jobs = dealt(model)
    assert relay(model.matrices, jobs, by_node(model.ranks, 4)) == jobs
    # One node, and a node for each rank.
    replicas = build("ddp", torch.arange(4), [(4, 5)] * 3)
    jobs = dealt(replicas)
    for size in (1, 4):
        assert relay(replicas.matrices, jobs, by_node(replicas.ranks, size)) == jobs


@pytest.mark.parametrize(
    ("kind", "mesh", "share"), [("hsdp", (16, 2), 4), ("ddp", (32,), 8)], ids=["hsdp", "ddp"]
)
def test_bytes_across_nodes_shrink_and_no_relay_does_all(
    kind: str, mesh: tuple[int, ...], share: int
) -> None:
    """Replicas of 2, or of 1, on nodes of 8."""
    # As many matrices as would have the same rank of a node forward all of a shape by turns.
    model = build(kind, torch.arange(32).view(mesh), [(16, 8), (4, 8)] * 4 * 16)
    node = by_node(model.ranks, 8)
    before = dealt(model)
    after = relay(model.matrices, before, node)

    def across(jobs: tuple[Job, ...]) -> int:
        pairs = sent_by_pair(model.matrices, jobs, 32)
        return sum(v.delivered for (a, b), v in pairs.items() if node[a] != node[b])

    assert share * across(after) == across(before)
    pairs = sent_by_pair(model.matrices, after, 32)
    assert sum(v.elements for v in pairs.values()) == predict(model.matrices, before).elements
    forwarded = Counter[int]()
    for job in after:
        matrix = model.matrices[job.matrix]
        for first, others in job.forwards.items():
            forwarded[first] += matrix.held_by(first) * len(others)
    mean = forwarded.total() / 32
    largest = 16 * 8 * 7
    assert max(forwarded[rank] for rank in range(32)) - mean <= largest


def test_relays_do_not_depend_on_other_sets_of_ranks() -> None:
    """A rank that belongs to two sets finds the relays that members of one find."""
    one = build("ddp", torch.tensor([0, 1, 2, 3]), [(4, 4)] * 3).matrices
    two = build("ddp", torch.tensor([0, 1, 4, 5]), [(4, 4)] * 3).matrices
    node = by_node(list(range(6)), 2)
    matrices = [*itertools.chain(*zip(one, two, strict=True))]
    both = relay(matrices, assign(matrices, [1.0] * 6), node)
    alone = relay(one, assign(one, [1.0] * 3), node)
    assert [job.forwards for job in both[::2]] == [job.forwards for job in alone]
