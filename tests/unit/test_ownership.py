"""Owners: one for each matrix, and all ranks with nearly the same work."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amo_dist.config import OPERATOR_TYPES
from amo_dist.distributed.layout import Matrix
from amo_dist.distributed.plan import assign
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
