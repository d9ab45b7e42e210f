"""Bytes on the wire: the formula, the pairs, and what the ranks count, to the byte."""

from __future__ import annotations

import os
from fractions import Fraction
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from amo_dist import AMO, AMOConfig, Muon, MuonConfig, param_groups
from amo_dist.distributed.layout import layout_of, matrix_layout
from amo_dist.distributed.ownership import Teams, assign
from amo_dist.distributed.relays import relay
from amo_dist.schedule.budget import ns_step_flops
from tests.distributed import models
from tests.distributed.harness import Ranks
from tests.ledger import Pair, Volume, predict, sent_by_pair

BF16, FP32 = 2, 4


def count(
    rank: int,
    world_size: int,
    layout: str,
    shapes: dict[str, tuple[int, ...]],
    fields: dict[str, Any],
    observes: bool = False,
    nodes: tuple[int, ...] = (0, 0, 0, 0),
) -> tuple[dict[int, int], dict[str, float], dict[Pair, Volume], Volume, int]:
    """What this rank counted in a step, and what the layouts predict for all."""
    with mock.patch("amo_dist.distributed.teams.FLOPS_PER_BYTE", 0):
        return _count(rank, world_size, layout, shapes, fields, observes, nodes)


def _count(
    rank: int,
    world_size: int,
    layout: str,
    shapes: dict[str, tuple[int, ...]],
    fields: dict[str, Any],
    observes: bool,
    nodes: tuple[int, ...],
) -> tuple[dict[int, int], dict[str, float], dict[Pair, Volume], Volume, int]:
    model = models.make_model(layout, shapes)
    group = dist.group.WORLD if layout == "plain" else None
    replicas = list(range(world_size)) if group is not None else [rank]
    groups = param_groups(model)
    matrices = [
        matrix_layout(name, layout_of(param, name, replicas), 0)
        for name, param in groups[0]["params"]
    ]
    if observes:
        config = AMOConfig(observe_until=2, observe_every=1, sample_size=2, **fields)
        optimizer: Muon = AMO(groups, config=config, process_group=group)
    else:
        optimizer = Muon(groups, config=MuonConfig(**fields), process_group=group)
    models.set_gradients(model, 1, 1)
    with mock.patch.dict(os.environ, GROUP_RANK=str(nodes[rank])):
        optimizer.step()
    drawn = set(optimizer.policy.sample(2))  # before the plan, of which step 2 is the last step
    models.set_gradients(model, 1, 2)
    optimizer.step()  # counted anew
    wide = frozenset(i for i, matrix in enumerate(matrices) if matrix.name in drawn)
    teams = Teams(fields.get("max_team", 1), BF16)
    costs = [float(ns_step_flops(*matrix.shape)) for matrix in matrices]
    jobs = assign(matrices, costs, owners=fields.get("owners", "mesh"), teams=teams)
    assert any(job.team for job in jobs) == (teams.most > 1)
    relayed = relay(matrices, jobs, dict(enumerate(nodes)))
    pairs = sent_by_pair(matrices, relayed, world_size, wide)
    total = predict(matrices, jobs, wide)
    elements = sum(matrix.num_elements for matrix in matrices)
    return optimizer.sent_bytes_by_peer(), optimizer.metrics(), pairs, total, elements


CASES = [
    pytest.param("fsdp", 2, False, {}, id="fsdp-2"),
    pytest.param("fsdp", 3, False, {}, id="fsdp-3-uneven-and-empty"),
    pytest.param("fsdp", 4, False, {}, id="fsdp-4-uneven-and-empty"),
    pytest.param("fsdp", 4, True, {}, id="fsdp-4-even"),
    pytest.param("hsdp", 4, False, {}, id="hsdp-2x2"),
    pytest.param("hsdp", 4, False, {"owners": "replica"}, id="hsdp-2x2-owners-in-replicas"),
    pytest.param("tp", 3, False, {}, id="tp-3-uneven"),
    pytest.param("tp_fsdp", 4, True, {}, id="tp-2-fsdp-2"),
    pytest.param("plain", 3, False, {}, id="ddp-3"),
    pytest.param("fsdp", 4, False, {"max_team": 2}, id="fsdp-4-teams"),
    pytest.param("hsdp", 4, False, {"max_team": 2}, id="hsdp-2x2-teams"),
]


@pytest.mark.parametrize(("layout", "world_size", "even", "fields"), CASES)
@pytest.mark.parametrize("bucket_bytes", [64, 2**20])
def test_ranks_send_what_the_ledger_says(
    run_on: Ranks,
    layout: str,
    world_size: int,
    even: bool,
    fields: dict[str, Any],
    bucket_bytes: int,
) -> None:
    shapes = models.shapes(models.EVEN_SHAPES if even else models.SHAPES)
    fields = {**fields, "bucket_bytes": bucket_bytes}
    results = run_on(world_size)(count, layout, shapes, fields)
    _, _, pairs, total, _ = results[0]
    for rank, (sent, metrics, *_) in enumerate(results):
        mine = {to: volume for (source, to), volume in pairs.items() if source == rank}
        assert sent == {to: volume.num_bytes(BF16, FP32) for to, volume in mine.items()}
        assert metrics["exchange/sent_bytes"] == sum(sent.values())
        assert metrics["exchange/sent_elements"] == sum(v.elements for v in mine.values())
    assert sum(sum(sent.values()) for sent, *_ in results) == total.num_bytes(BF16, FP32) > 0


@pytest.mark.parametrize(("layout", "nodes"), [("plain", (0, 0, 1, 1)), ("hsdp", (0, 1, 0, 1))])
@pytest.mark.parametrize("observes", [False, True])
def test_relays_send_what_the_ledger_says(
    run_on: Ranks, layout: str, nodes: tuple[int, ...], observes: bool
) -> None:
    results = run_on(4)(count, layout, models.shapes(), {"bucket_bytes": 256}, observes, nodes)
    _, _, pairs, total, _ = results[0]
    for rank, (sent, *_) in enumerate(results):
        mine = {to: volume for (source, to), volume in pairs.items() if source == rank}
        assert sent == {to: volume.num_bytes(BF16, FP32) for to, volume in mine.items()}
    assert sum(sum(sent.values()) for sent, *_ in results) == total.num_bytes(BF16, FP32)
    direct = run_on(4)(count, layout, models.shapes(), {"bucket_bytes": 256}, observes)
    assert pairs != direct[0][2]


def test_even_fsdp_sends_the_volume_of_the_formula(run_on: Ranks) -> None:
    shapes = models.shapes(models.EVEN_SHAPES)
    results = run_on(4)(count, "fsdp", shapes, {})
    elements = results[0][4]
    mean = Fraction(sum(sum(sent.values()) for sent, *_ in results), 4)
    assert mean == Fraction(2 * BF16 * elements * 3, 4**2)


def test_observed_matrices_travel_once_in_the_dtype_of_momentum(run_on: Ranks) -> None:
    results = run_on(2)(count, "fsdp", models.shapes(), {}, True)
    _, _, pairs, total, _ = results[0]
    assert total.gathered_wide > 0 < total.gathered
    for rank, (sent, *_) in enumerate(results):
        expected = {
            to: v.num_bytes(BF16, FP32) for (source, to), v in pairs.items() if source == rank
        }
        assert sent == expected


def test_one_process_sends_nothing(run_on: Ranks) -> None:
    ((sent, metrics, *_),) = run_on(1)(count, "fsdp", models.shapes(), {})
    assert sent == {}
    assert metrics["exchange/sent_bytes"] == metrics["exchange/sent_elements"] == 0
