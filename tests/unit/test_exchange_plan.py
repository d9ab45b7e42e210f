"""Plans of all ranks fit together, send no more than they need, and give every rank its result."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from amo_dist.distributed.plan import ExchangePlan, Job, assign, plan_exchange
from tests.layouts import Model, models

few = settings(max_examples=30, deadline=None)
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
