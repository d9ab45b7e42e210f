"""Owners: one for each matrix, and all ranks with nearly the same work."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amo_dist.config import OPERATOR_TYPES
from amo_dist.distributed.layout import Matrix
from amo_dist.distributed.plan import ExchangePlan, Job, assign, plan_exchange
from amo_dist.schedule.allocate import ns_step_flops
from benchmarks import scale
from tests.layouts import Model, build, models

few = settings(max_examples=40, deadline=None)


def owners_of(matrices: Sequence[Matrix], costs: list[float]) -> dict[int, int]:
    """Owner by matrix; all matrices lie on one set of ranks."""
    (jobs,) = assign(matrices, costs).values()
    return {job.matrix: job.owner for job in jobs}


def draw_costs(data: st.DataObject, count: int) -> list[float]:
    # Integers: sums are exact in any order.
    return [float(data.draw(st.integers(1, 100))) for _ in range(count)]


@few
@given(models(), st.data())
def test_balanced_gives_each_matrix_to_the_rank_with_the_least(
    model: Model, data: st.DataObject
) -> None:
    costs, matrices = draw_costs(data, len(model.matrices)), model.matrices
    found = owners_of(matrices, costs)
    candidates = [
        [rank for rank in model.ranks if m.num_held(rank) == m.num_elements] or model.ranks
        for m in matrices
    ]
    order = sorted(
        range(len(matrices)), key=lambda i: (len(candidates[i]), -costs[i], matrices[i].name)
    )
    loads = dict.fromkeys(model.ranks, 0.0)
    for index in order:
        owner = min(candidates[index], key=loads.__getitem__)  # of equal ones the first
        assert found[index] == owner
        loads[owner] += costs[index]
    if all(len(own) == len(model.ranks) for own in candidates):
        # The rank with the greatest load had the least before its last matrix.
        assert max(loads.values()) - min(loads.values()) <= max(costs)


@pytest.mark.parametrize(("name", "ranks"), scale.CASES)
@pytest.mark.parametrize("planned", [(5,) * 7, (7, 6, 4, 7, 4, 4, 5)], ids=["uniform", "planned"])
def test_no_rank_has_a_fifth_more_than_the_mean(
    name: str, ranks: int, planned: tuple[int, ...]
) -> None:
    registry, matrices = scale.lay_out(name, ranks)
    assert len(matrices) >= 2 * ranks
    steps = defaultdict(lambda: 5, zip(OPERATOR_TYPES, planned, strict=True))
    costs = [float(steps[info.operator_type] * ns_step_flops(*info.shape)) for info in registry]
    loads = Counter[int]()
    for index, owner in owners_of(matrices, costs).items():
        loads[owner] += costs[index]
    assert max(loads.values()) <= 1.2 * sum(costs) / ranks


def test_sets_of_ranks_are_assigned_apart() -> None:
    first, second = (
        build("fsdp", mesh, [(8, 8)] * 3) for mesh in (torch.arange(4), torch.arange(2, 4).flip(0))
    )
    jobs = assign((*first.matrices, *second.matrices), [1.0] * 6)
    owners = {ranks: [(job.matrix, job.owner) for job in own] for ranks, own in jobs.items()}
    assert owners == {(0, 1, 2, 3): [(0, 0), (1, 1), (2, 2)], (2, 3): [(3, 3), (4, 2), (5, 3)]}


# ---------------------------------------------------------------- exchanges


WIRE = 2
"""Bytes of an element."""


def plan_all(model: Model, jobs: tuple[Job, ...], bucket_bytes: int) -> dict[int, ExchangePlan]:
    return {
        rank: plan_exchange(
            model.matrices,
            jobs,
            rank=rank,
            peers=model.ranks,
            itemsize=WIRE,
            bucket_bytes=bucket_bytes,
        )
        for rank in model.ranks
    }


@st.composite
def problems(draw: st.DrawFn) -> tuple[Model, tuple[Job, ...], dict[int, ExchangePlan], int]:
    model = draw(models(max_ranks=24))
    (jobs,) = assign(
        model.matrices,
        [float(matrix.num_elements) for matrix in model.matrices],
        ownership=draw(st.sampled_from(["round_robin", "balanced"])),
    ).values()
    bucket_bytes = draw(st.sampled_from([1, 100, 1000, 10**6]))
    return model, jobs, plan_all(model, jobs, bucket_bytes), bucket_bytes


@few
@given(problems())
def test_plans_of_all_ranks_fit_together(problem: tuple) -> None:
    model, jobs, plans, bucket_bytes = problem
    # What one rank sends is what the other receives.
    assert len({len(plan.buckets) for plan in plans.values()}) == 1
    place = {rank: index for index, rank in enumerate(model.ranks)}
    for source, destination in itertools.product(model.ranks, repeat=2):
        to, back = place[destination], place[source]
        for here, there in zip(plans[source].buckets, plans[destination].buckets, strict=True):
            assert here.to_owners[to] == there.from_holders[back]
            assert here.to_holders[to] == there.from_owners[back]
    # An owner gathers a matrix, less what it holds, and delivers it to the replicas that it serves,
    # less the same.
    expected = 0
    for job in jobs:
        matrix = model.matrices[job.matrix]
        served = sum(replica[0] in job.targets for replica in matrix.replicas)
        expected += (1 + served) * matrix.num_elements - 2 * matrix.num_held(job.owner)
    assert sum(plan.num_sent for plan in plans.values()) == expected
    # Each matrix has one owner, which gathers one replica and delivers to all ranks.
    assert [job.matrix for job in jobs] == list(range(len(model.matrices)))
    for job in jobs:
        matrix = model.matrices[job.matrix]
        assert job.owner in job.sources
        assert job.sources in matrix.replicas
        assert sorted(job.targets) == sorted(matrix.ranks)
    # Each job is in one bucket of its owner, and no bucket is too full.
    found: list[int] = []
    for rank, plan in plans.items():
        for bucket in (*plan.buckets, *plan.local):
            assert all(jobs[index].owner == rank for index in bucket.owned)
            found += bucket.owned
            # All that the sources hold comes, and all that the targets hold goes.
            for peer, arriving, leaving in zip(
                plan.peers, bucket.from_holders, bucket.to_holders, strict=True
            ):
                regions = {i: model.matrices[i].regions_by_rank.get(peer, ()) for i in bucket.owned}
                held = [(i, region) for i, own in regions.items() for region in own]
                assert [*arriving] == [part for part in held if peer in jobs[part[0]].sources]
                assert [*leaving] == [part for part in held if peer in jobs[part[0]].targets]
            sizes = [WIRE * model.matrices[index].num_elements for index in bucket.owned]
            assert sum(sizes) <= bucket_bytes or len(sizes) == 1
    assert sorted(found) == [job.matrix for job in jobs]
