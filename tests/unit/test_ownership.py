"""Owners: one for each matrix or one in each replica, and balanced where that helps."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amo_dist.distributed.layout import Matrix
from amo_dist.distributed.plan import Job, assign, load_by_rank
from tests.layouts import Model, build, models

few = settings(max_examples=40, deadline=None)
OWNERSHIP = st.sampled_from(["round_robin", "balanced"])


def greatest(jobs: tuple[Job, ...], costs: list[float]) -> float:
    return max(load_by_rank({job.matrix: job.owner for job in jobs}, costs).values())


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


@few
@given(st.lists(models(max_ranks=8), min_size=2, max_size=4), st.data(), OWNERSHIP)
def test_what_a_set_of_ranks_gets_follows_from_its_matrices_alone(
    parts: list[Model], data: st.DataObject, ownership: str
) -> None:
    """Ranks that share one set may know different others, disjoint from it or not."""
    by_ranks: dict[tuple[int, ...], list[Matrix]] = defaultdict(list)
    for number, part in enumerate(parts):
        for matrix in part.matrices:
            renamed = dataclasses.replace(matrix, name=f"{number}.{matrix.name}")
            by_ranks[tuple(sorted(matrix.ranks))].append(renamed)
    matrices = data.draw(st.permutations([m for found in by_ranks.values() for m in found]))
    costs = draw_costs(data, len(matrices))
    cost_by_name = {m.name: cost for m, cost in zip(matrices, costs, strict=True)}
    together = assign(matrices, costs, ownership=ownership)
    for ranks in by_ranks:
        here = [matrix for matrix in matrices if tuple(sorted(matrix.ranks)) == ranks]
        alone = assign(here, [cost_by_name[m.name] for m in here], ownership=ownership)
        found = [job for job in together if tuple(sorted(matrices[job.matrix].ranks)) == ranks]
        assert [(matrices[job.matrix].name, job.owner) for job in found] == [
            (here[job.matrix].name, job.owner) for job in alone
        ]


def test_a_matrix_goes_to_a_rank_that_holds_it_whole() -> None:
    # One row: torch.chunk gives it to the first rank.
    model = build("fsdp", torch.arange(4), [(1, 8), (8, 8), (1, 8)])
    owners = [job.owner for job in assign(model.matrices, [1.0] * 3)]
    assert owners == [0, 0, 0]
