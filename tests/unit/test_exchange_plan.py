"""Plans of all ranks fit together, and give every rank each of its results once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from amo_dist.distributed.plan import (
    ExchangePlan,
    Held,
    Owners,
    assign,
    copies_of,
    count_elements,
    plan_exchange,
)
from tests.layouts import Model, models

few = settings(max_examples=30, deadline=None)
WIRE = 2
"""Bytes of an element."""


@st.composite
def problems(draw: st.DrawFn) -> tuple[Model, Owners, dict[int, ExchangePlan], int]:
    model = draw(models(max_ranks=24))
    ((replicas, owners),) = assign(
        model.matrices,
        [float(matrix.num_elements) for matrix in model.matrices],
        ownership=draw(st.sampled_from(["round_robin", "balanced"])),
    ).items()
    bucket_bytes = draw(st.sampled_from([1, 100, 1000, 10**6]))
    plans = {
        rank: plan_exchange(
            model.matrices,
            owners,
            replicas,
            rank=rank,
            peers=model.ranks,
            copies=copies_of(replicas, rank),
            itemsize=WIRE,
            bucket_bytes=bucket_bytes,
        )
        for rank in model.ranks
    }
    return model, owners, plans, bucket_bytes


def held_by(model: Model, rank: int, indices: Sequence[int]) -> list[Held]:
    return [
        (i, region) for i in indices for region in model.matrices[i].regions_by_rank.get(rank, ())
    ]


@few
@given(problems())
def test_plans_of_all_ranks_fit_together(problem: tuple) -> None:
    model, owners, plans, bucket_bytes = problem
    # What one rank sends is what the other receives.
    assert len({len(plan.buckets) for plan in plans.values()}) == 1
    place = {rank: index for index, rank in enumerate(model.ranks)}
    for source, target in itertools.product(model.ranks, repeat=2):
        for here, there in zip(plans[source].buckets, plans[target].buckets, strict=True):
            assert here.to_owners[place[target]] == there.from_holders[place[source]]
    travelling: list[int] = []
    for rank, plan in plans.items():
        for number, bucket in enumerate(plan.buckets):
            # Copies hold the same regions, in the same order, in parts of the same length.
            assert plan.copies[bucket.place] == rank
            for copy in plan.copies:
                other = plans[copy].buckets[number]
                assert (other.by_replica, other.num_by_replica) == (
                    bucket.by_replica,
                    bucket.num_by_replica,
                )
            home = [*itertools.chain(*bucket.to_owners)]
            assert [*bucket.by_replica[bucket.place]] == home
            # Every region of the bucket comes once.
            all_owned = [i for other in plans.values() for i in other.buckets[number].owned]
            received = [*itertools.chain(*bucket.by_replica)]
            assert sorted(received, key=repr) == sorted(held_by(model, rank, all_owned), key=repr)
        for bucket in (*plan.buckets, *plan.local):
            # Each matrix is in one bucket of its owner, and no bucket is too full.
            assert all(owners[index] == rank for index in bucket.owned)
            travelling += bucket.owned
            sizes = [WIRE * model.matrices[index].num_elements for index in bucket.owned]
            assert sum(sizes) <= bucket_bytes or len(sizes) == 1
    assert sorted(travelling) == sorted(owners) == list(range(len(model.matrices)))


@few
@given(problems())
def test_ranks_send_matrices_there_and_back_and_once_to_each_copy(problem: tuple) -> None:
    model, owners, plans, _ = problem
    for rank, plan in plans.items():
        expected = 0
        for index, owner in owners.items():
            matrix = model.matrices[index]
            home = next(ranks for ranks in matrix.replicas if owner in ranks)
            if rank != owner and rank in home:
                expected += matrix.num_held(rank)
            if rank == owner:
                expected += matrix.num_elements - matrix.num_held(rank)
            expected += (len(plan.copies) - 1) * matrix.num_held(rank) * (rank in home)
        padding = sum(
            (len(plan.copies) - 1)
            * (bucket.num_by_replica - count_elements(bucket.by_replica[bucket.place]))
            for bucket in plan.buckets
        )
        assert plan.num_sent == expected + padding
