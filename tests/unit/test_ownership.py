"""Owners: one for each matrix or one in each replica, and balanced where that helps."""

from __future__ import annotations

from collections import Counter, defaultdict

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amo_dist.distributed.plan import Job, assign, greatest_load
from tests.layouts import Model, build, models

few = settings(max_examples=40, deadline=None)
OWNERSHIP = st.sampled_from(["round_robin", "balanced"])


def greatest(jobs: list[Job], costs: list[float]) -> float:
    return greatest_load({job.matrix: job.owner for job in jobs}, costs)


def draw_costs(data: st.DataObject, count: int) -> list[float]:
    # Integers: sums are exact in any order.
    return [float(data.draw(st.integers(1, 100))) for _ in range(count)]


@few
@given(models(), st.data(), OWNERSHIP)
def test_each_matrix_has_one_owner(model: Model, data: st.DataObject, ownership: str) -> None:
    costs = draw_costs(data, len(model.matrices))
    jobs = assign(model.matrices, costs, ownership=ownership)
    by_matrix: dict[int, list[Job]] = defaultdict(list)
    for job in jobs:
        by_matrix[job.matrix].append(job)
    assert sorted(by_matrix) == list(range(len(model.matrices)))
    for index, found in by_matrix.items():
        matrix = model.matrices[index]
        targets = Counter(rank for job in found for rank in job.targets)
        assert targets == Counter(matrix.ranks)  # each gets its result from one owner
        assert len(found) == 1
        for job in found:
            assert job.owner in job.sources
            assert job.sources in matrix.replicas


@few
@given(models(), st.data())
def test_balanced_is_never_worse_than_round_robin(model: Model, data: st.DataObject) -> None:
    costs = draw_costs(data, len(model.matrices))
    dealt = assign(model.matrices, costs)
    balanced = assign(model.matrices, costs, ownership="balanced")
    assert greatest(balanced, costs) <= greatest(dealt, costs)


def test_a_matrix_goes_to_a_rank_that_holds_it_whole() -> None:
    # One row: torch.chunk gives it to the first rank.
    model = build("fsdp", torch.arange(4), [(1, 8), (8, 8), (1, 8)])
    owners = [job.owner for job in assign(model.matrices, [1.0] * 3)]
    assert owners == [0, 0, 0]


def test_balanced_evens_out_unequal_costs() -> None:
    model = build("fsdp", torch.arange(2), [(8, 8)] * 4)
    jobs = assign(model.matrices, [3.0, 1.0, 1.0, 1.0], ownership="balanced")
    assert [job.owner for job in jobs] == [0, 1, 1, 1]
