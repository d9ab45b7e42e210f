"""Plans of all ranks fit together, move what the ledger says, and give every rank its result."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amo_dist.distributed.plan import BucketPlan, ExchangePlan, Held, Job, assign, plan_exchange
from tests.layouts import Model, local_tensor, models
from tests.ledger import Volume, predict, sent_by_pair

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
    jobs = assign(
        model.matrices,
        [float(matrix.num_elements) for matrix in model.matrices],
        ownership=draw(st.sampled_from(["round_robin", "balanced"])),
    )
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
    # They move what the ledger says.
    pairs = sent_by_pair(model.matrices, jobs, max(model.ranks) + 1)
    for rank, plan in plans.items():
        assert plan.num_sent == sum(v.elements for pair, v in pairs.items() if pair[0] == rank)
    assert sum(pairs.values(), Volume()) == predict(model.matrices, jobs)
    # Each job is in one bucket of its owner, and no bucket is too full.
    found: list[int] = []
    for rank, plan in plans.items():
        for bucket in (*plan.buckets, *plan.local):
            assert all(jobs[index].owner == rank for index in bucket.owned)
            found += bucket.owned
            sizes = [WIRE * model.matrices[index].num_elements for index in bucket.owned]
            assert sum(sizes) <= bucket_bytes or len(sizes) == 1
    assert sorted(found) == [job.matrix for job in jobs]


def run_on_paper(model: Model, plans: dict[int, ExchangePlan]) -> list[dict[int, torch.Tensor]]:
    """Carry out the plans of all ranks in one process; the computation negates a matrix.

    Returns:
        For each tensor, what each rank holds afterwards.
    """
    wholes = [
        torch.arange(1, 1 + torch.Size(layout.shape).numel()).view(layout.shape)
        for layout in model.tensors
    ]
    before = [
        {rank: local_tensor(layout, whole, rank) for rank in model.ranks}
        for layout, whole in zip(model.tensors, wholes, strict=True)
    ]
    after = [{rank: torch.zeros_like(local) for rank, local in held.items()} for held in before]

    def source(tensors: list[dict[int, torch.Tensor]], held: Held, rank: int) -> torch.Tensor:
        matrix, region = held
        local = tensors[model.matrices[matrix].param][rank]
        return local[tuple(slice(*interval) for interval in region.source)]

    def gathered(bucket: BucketPlan, rank: int) -> dict[int, torch.Tensor]:
        whole = {
            index: torch.zeros(model.matrices[index].shape, dtype=torch.int64)
            for index in bucket.owned
        }
        arrivals: list[tuple[int, Held]] = []
        for peer, parts in zip(plans[rank].peers, bucket.from_holders, strict=True):
            arrivals += [(peer, part) for part in parts]
        for peer, (matrix, region) in arrivals:
            rows, columns = (slice(*interval) for interval in region.target)
            place = whole[matrix][rows, columns]
            place += source(before, (matrix, region), peer).reshape(place.shape)
        return whole

    for rank, plan in plans.items():
        for bucket in (*plan.buckets, *plan.local):
            whole = {index: -matrix for index, matrix in gathered(bucket, rank).items()}
            deliveries: list[tuple[int, Held]] = []
            for peer, parts in zip(plan.peers, bucket.to_holders, strict=True):
                deliveries += [(peer, part) for part in parts]
            for peer, (matrix, region) in deliveries:
                rows, columns = (slice(*interval) for interval in region.target)
                place = source(after, (matrix, region), peer)
                place += whole[matrix][rows, columns].reshape(place.shape)
    return after


@few
@given(problems())
def test_carried_out_on_paper_every_rank_gets_its_part_of_the_result_once(problem: tuple) -> None:
    model, _, plans, _ = problem
    for layout, held in zip(model.tensors, run_on_paper(model, plans), strict=True):
        whole = -torch.arange(1, 1 + torch.Size(layout.shape).numel()).view(layout.shape)
        for rank, local in held.items():
            assert torch.equal(local, local_tensor(layout, whole, rank))
