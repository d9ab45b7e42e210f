"""Teams: slabs, their costs, who shares what, and loads on many ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amo_dist import AdaMuon, Muon, MuonConfig, NorMuon, param_groups
from amo_dist.config import OPERATOR_TYPES
from amo_dist.distributed.ownership import Job, assign, load_by_rank
from amo_dist.distributed.teams import FLOPS_PER_BYTE, choices, member_costs, share_of, slabs
from amo_dist.schedule.budget import ns_step_flops
from tests.distributed import models as models_of_ranks
from tests.layouts import Model, build, models
from tests.step_costs import step_costs
from torchtitan_ext.tools.shapes import MODELS, PLANS
from torchtitan_ext.tools.step_cost import lay_out

few = settings(max_examples=40, deadline=None)
OWNERSHIP = st.sampled_from(["round_robin", "balanced"])


@given(st.integers(1, 40), st.integers(1, 40), st.data())
def test_slabs_cut_the_long_side_evenly(m: int, n: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, max(m, n)))
    boxes = slabs((m, n), size)
    covered = torch.zeros(m, n)
    for (top, bottom), (left, right) in boxes:
        covered[top:bottom, left:right] += 1
        assert (bottom - top, right - left)[m <= n] in (max(m, n) // size, -(-max(m, n) // size))
    assert len(boxes) == size
    assert (covered == 1).all()
    # Products with the slab are shared, the square of the Gram matrix is not.
    again = (size - 1) * min(m, n) / (2 * max(m, n) + min(m, n))
    assert sum(share_of((m, n), box) for box in boxes) == pytest.approx(1 + again)


def test_a_member_computes_its_slab_and_sends_its_share_of_a_ring() -> None:
    steps, (m, n) = 5, (4, 12)
    found = member_costs((m, n), float(steps * ns_step_flops(m, n)), 9, 2)
    assert sorted(found) == [1, 2, 4, 8]
    for size, cost in found.items():
        flops = 2 * m * m * (2 * math.ceil(n / size) + m)
        sent = 2 * (size - 1) / size * m * m * 2
        assert cost == pytest.approx(steps * (flops + sent * FLOPS_PER_BYTE))
    assert sorted(member_costs((3, 2), 1.0, 8, 2)) == [1, 2]  # no slab is empty


def test_each_bound_takes_the_smallest_team_within_it() -> None:
    costs = {0: {1: 10.0, 2: 6.0, 4: 7.0}, 3: {1: 5.0}}
    assert list(choices(costs)) == [{0: 2, 3: 1}, {0: 1, 3: 1}]


def flops(model: Model) -> list[float]:
    # Flops of which sending is a small part, so that teams of small matrices pay, too.
    return [1e9 * ns_step_flops(*matrix.shape) for matrix in model.matrices]


def by_matrix(jobs: tuple[Job, ...]) -> dict[int, list[Job]]:
    found: dict[int, list[Job]] = defaultdict(list)
    for job in jobs:
        found[job.matrix].append(job)
    return found


@few
@given(models(max_ranks=16), OWNERSHIP, st.integers(2, 9))
def test_teams_are_aligned_and_cover_each_matrix_once(
    model: Model, ownership: str, most: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("amo_dist.distributed.teams.FLOPS_PER_BYTE", 0)
        jobs = assign(model.matrices, flops(model), ownership=ownership, max_team=most)
    assert [job.matrix for job in jobs] == sorted(job.matrix for job in jobs)
    for index, found in by_matrix(jobs).items():
        matrix, size = model.matrices[index], len(found)
        assert tuple(job.box for job in found) == slabs(matrix.shape, size)
        for job in found:
            assert job.owner in job.sources
            assert job.targets == matrix.ranks
            assert job.share == share_of(matrix.shape, job.box)
        if size == 1:
            assert found[0].team == ()
            continue
        assert size <= most
        team = tuple(job.owner for job in found)
        assert all(job.team == team for job in found)
        start = matrix.ranks.index(team[0])
        assert start % size == 0
        assert team == matrix.ranks[start : start + size]


def test_teams_are_taken_only_where_they_lower_the_greatest_load() -> None:
    # Adding up small Gram matrices takes longer than their products.
    model = build("fsdp", torch.arange(4), [(64, 64)])
    costs = [float(ns_step_flops(64, 64))]
    assert [job.team for job in assign(model.matrices, costs, max_team=4)] == [()]
    model = build("fsdp", torch.arange(4), [(4096, 4096)])
    jobs = assign(model.matrices, [float(ns_step_flops(4096, 4096))], max_team=4)
    assert [job.team for job in jobs] == [(0, 1, 2, 3)] * 4


def test_what_a_rank_holds_whole_is_not_shared() -> None:
    experts = build("experts_0", torch.arange(4), [(2, 4096, 4096)])
    costs = [float(ns_step_flops(4096, 4096))] * 2
    assert {job.team for job in assign(experts.matrices, costs, max_team=4)} == {()}
    # Where all ranks do, as under DDP, any may have a slab.
    replicas = build("ddp", torch.arange(4), [(4096, 4096)])
    assert len(assign(replicas.matrices, costs[:1], max_team=2)) == 2


@pytest.mark.parametrize(
    ("name", "layout", "ranks", "most"),
    [("Qwen3-1.7B", "fsdp", 256, 1.3), ("Llama-3.1-1.4B", "hsdp", 256, 1.3)],
)
def test_teams_even_out_the_load_of_many_ranks(
    name: str, layout: str, ranks: int, most: float
) -> None:
    shape = MODELS[name]
    rows = step_costs(
        shape.matrices(), dict.fromkeys(OPERATOR_TYPES, 5), ranks, layout=layout, max_team=8
    )
    found = {(bool(row["teams"]), row["ownership"]): row for row in rows}
    before, after = (found[has_teams, "balanced"]["gflop"] for has_teams in (False, True))
    assert after["most"] <= most * after["mean"]
    assert before["most"] > 2 * before["mean"]
    assert after["most"] < 0.6 * before["most"]
    # A team lies within a node: what it adds up crosses none, and an owner's bytes are split.
    before, after = (found[has_teams, "balanced"]["sent_across"] for has_teams in (False, True))
    assert after["most"] < before["most"]
    assert after["mean"] == pytest.approx(before["mean"], rel=0.01)


def test_gram_matrices_are_part_of_the_traffic() -> None:
    shape = MODELS["Qwen3-1.7B"]
    steps = dict(zip(OPERATOR_TYPES, PLANS["Qwen3-1.7B"], strict=True))
    infos = shape.matrices()
    matrices = lay_out(infos, 256)
    costs = [float(steps[i.operator_type] * ns_step_flops(*i.shape)) for i in infos]
    for ownership in ("round_robin", "balanced"):
        rows = step_costs(infos, steps, 256, max_team=8)
        (row,) = (
            row
            for row in rows
            if row["teams"] and (row["ownership"], row["schedule"]) == (ownership, "locked")
        )
        jobs = assign(matrices, costs, ownership=ownership, max_team=8)
        busiest = max(load_by_rank(jobs, costs).values())
        assert row["gflop"]["most"] * 1e9 == pytest.approx(busiest, rel=1e-12)
        assert row["teams"] == {"2": 84}
        grams = sum(
            2 * 2 * 2048**2 // 2 * steps[infos[job.matrix].operator_type]
            for job in jobs
            if job.team
        )
        # Even FSDP: what is gathered and delivered does not depend on the owners.
        elements = sum(matrix.num_elements for matrix in matrices)
        moved = 2 * elements * 255 / 256
        assert row["sent"]["mean"] == pytest.approx((grams + 2 * moved) / 256, rel=1e-9)


@pytest.mark.parametrize(
    "fields",
    [{"max_team": 0}, {"max_team": 2.0}],
)
def test_settings_under_which_nothing_is_shared_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"max_team: found {fields['max_team']}, expected"):
        MuonConfig(**fields)


@pytest.mark.parametrize("optimizer", [AdaMuon, NorMuon])
def test_rules_that_work_on_pieces_share_nothing(optimizer: type[Muon]) -> None:
    model = models_of_ranks.plain_model({"layers.0.attention.wq.weight": (4, 4)})
    groups = param_groups(model)
    with pytest.raises(ValueError, match=r"max_team: found 2 with .*, which works on pieces"):
        optimizer(groups, config=MuonConfig(max_team=2))
