"""Owners: one for each matrix, and all ranks with nearly the same work."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from amo_dist.config import OPERATOR_TYPES, MuonConfig
from amo_dist.distributed.layout import Matrix, make_matrix, mesh_layout
from amo_dist.distributed.plan import assign, copies_of, plan_exchange
from amo_dist.schedule.allocate import ns_step_flops
from benchmarks import scale
from tests.layouts import Model, build, models

few = settings(max_examples=40, deadline=None)


def owners_of(matrices: Sequence[Matrix], costs: list[float]) -> dict[int, int]:
    """Owner by matrix; all matrices lie on one set of ranks."""
    (owners,) = assign(matrices, costs).values()
    return dict(owners)


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
    # Replicas take turns.
    turns = [rank for ranks in zip(*matrices[0].replicas, strict=True) for rank in ranks]
    candidates = [
        [rank for rank in turns if m.num_held(rank) == m.num_elements] or turns for m in matrices
    ]
    order = sorted(
        range(len(matrices)), key=lambda i: (len(candidates[i]), -costs[i], matrices[i].name)
    )
    loads = dict.fromkeys(turns, 0.0)
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
    owners = assign((*first.matrices, *second.matrices), [1.0] * 6)
    assert owners == {((0, 1, 2, 3),): {0: 0, 1: 1, 2: 2}, ((3, 2),): {3: 3, 4: 2, 5: 3}}


def test_replicas_own_alike() -> None:
    model = build("hsdp", torch.arange(8).view(4, 2), [(8, 8)] * 6)
    owners = owners_of(model.matrices, [1.0] * 6)
    assert [*owners.values()] == [0, 2, 4, 6, 1, 3]


@pytest.mark.parametrize(("replicas", "shards"), [(4, 64), (16, 64), (8, 32)])
def test_no_rank_sends_much_more_than_the_mean(replicas: int, shards: int) -> None:
    """Where an owner sent its results to all replicas, the busiest sent 13 times as much."""
    mesh = torch.arange(replicas * shards).view(replicas, shards)
    placements = [Replicate(), Shard(0)]
    shapes = [*scale.shapes_of("70B").values()]
    matrices = [
        make_matrix(f"m{i}", mesh_layout(shape, mesh, placements), i)
        for i, shape in enumerate(shapes)
    ]
    costs = [float(ns_step_flops(*matrix.shape)) for matrix in matrices]
    ((together, owners),) = assign(matrices, costs).items()
    # One of 37 ranks, and the owner of the largest matrix.
    ranks = [owners[costs.index(max(costs))], *range(0, replicas * shards, 37)]
    sent = [
        plan_exchange(
            matrices,
            owners,
            together,
            rank=rank,
            peers=range(replicas * shards),
            copies=copies_of(together, rank),
            itemsize=2,
            bucket_bytes=MuonConfig().bucket_bytes,
        ).num_sent
        for rank in ranks
    ]
    assert max(sent) <= 1.3 * sum(sent) / len(sent)
