"""Bytes on the wire: the formula, the pairs, and what the ranks count, to the byte."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch.distributed as dist

from amo_dist import AMO, AMOConfig, Muon, MuonConfig, param_groups
from amo_dist.distributed.layout import layout_of, make_matrix
from amo_dist.distributed.plan import assign
from amo_dist.schedule.allocate import ns_step_flops
from tests.distributed import models
from tests.distributed.harness import Ranks
from tests.ledger import Pair, Volume, predict, sent_by_pair

BF16, FP32 = 2, 4
SHAPES = models.shapes()
EVEN = models.shapes(models.EVEN_SHAPES)  # FSDP over TP needs even dims
Pairs = dict[Pair, Volume]


@dataclasses.dataclass(frozen=True)
class Counted:
    """What a rank counted in a step, and what the layouts predict for all."""

    sent: float
    pairs: Pairs
    total: Volume
    observed: Pairs
    """Beside ``pairs``, to measure; nothing of it is delivered."""


def count(
    rank: int,
    world_size: int,
    layout: str,
    shapes: dict[str, tuple[int, ...]],
    bucket_bytes: int = 2**20,
    observes: bool = False,
) -> Counted:
    model = models.make_model(layout, shapes)
    group = dist.group.WORLD if layout == "plain" else None
    replicas = list(range(world_size)) if group is not None else [rank]
    groups = param_groups(model)
    matrices = [
        make_matrix(name, layout_of(param, name, replicas), 0)
        for name, param in groups[0]["params"]
    ]
    fields: dict[str, Any] = {"ns_dtype": "bfloat16", "bucket_bytes": bucket_bytes}
    if observes:
        phases = {"observe_until": 2, "observe_every": 1, "sample_size": 2}
        config = AMOConfig(**phases, **fields)
        optimizer: Muon = AMO(groups, config=config, process_group=group)
    else:
        optimizer = Muon(groups, config=MuonConfig(**fields), process_group=group)
    models.set_gradients(model, 1, 1)
    optimizer.step()
    drawn = set(optimizer.source.sample(2))
    assert bool(drawn) == observes
    models.set_gradients(model, 1, 2)
    optimizer.step()  # counted anew
    costs = [float(ns_step_flops(*matrix.shape)) for matrix in matrices]
    jobs = assign(matrices, costs)
    some = [matrix for matrix in matrices if matrix.name in drawn]
    to_measure = assign(some, [1.0] * len(some))
    observed = {
        pair: Volume(gathered=volume.gathered)
        for pair, volume in sent_by_pair(some, to_measure, world_size).items()
    }
    return Counted(
        optimizer.metrics()["exchange/sent_bytes"],
        sent_by_pair(matrices, jobs, world_size),
        predict(matrices, jobs),
        observed,
    )


def sent_by(rank: int, pairs: Pairs) -> Volume:
    return sum((volume for (source, _), volume in pairs.items() if source == rank), Volume())


CASES = [
    pytest.param("fsdp", 1, SHAPES, 2**20, id="one-process"),
    pytest.param("fsdp", 2, SHAPES, 2**20, id="fsdp-2"),
    pytest.param("fsdp", 4, SHAPES, 64, id="fsdp-4-uneven-and-empty"),
    pytest.param("hsdp", 4, SHAPES, 2**20, id="hsdp-2x2"),
    pytest.param("tp", 3, SHAPES, 64, id="tp-3-uneven"),
    pytest.param("tp_fsdp", 4, EVEN, 2**20, id="tp-2-fsdp-2"),
    pytest.param("plain", 3, SHAPES, 64, id="ddp-3"),
]


@pytest.mark.parametrize(("layout", "world_size", "shapes", "bucket_bytes"), CASES)
def test_ranks_send_what_the_ledger_says(
    run_on: Ranks,
    layout: str,
    world_size: int,
    shapes: dict[str, tuple[int, ...]],
    bucket_bytes: int,
) -> None:
    results = run_on(world_size)(count, layout, shapes, bucket_bytes)
    for rank, found in enumerate(results):
        assert found.sent == BF16 * sent_by(rank, results[0].pairs).elements
    total = sum(found.sent for found in results)
    assert total == BF16 * results[0].total.elements
    assert bool(total) == (world_size > 1)


@pytest.mark.parametrize("layout", ["fsdp", "hsdp"])
def test_observed_matrices_are_gathered_once_more_in_the_dtype_of_momentum(
    run_on: Ranks, layout: str
) -> None:
    results = run_on(4)(count, layout, SHAPES, 2**20, True)
    assert sum(volume.gathered for volume in results[0].observed.values()) > 0
    for rank, found in enumerate(results):
        trained, observed = sent_by(rank, found.pairs), sent_by(rank, found.observed)
        assert found.sent == BF16 * trained.elements + FP32 * observed.gathered
