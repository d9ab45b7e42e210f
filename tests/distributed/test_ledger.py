"""Bytes on the wire: what the ranks count is what the ledger says, pair by pair."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from amo_dist import AMO, AMOConfig, Muon, MuonConfig, param_groups
from amo_dist.distributed.layout import Matrix, layout_of, make_matrix
from amo_dist.distributed.plan import assign
from amo_dist.schedule.allocate import ns_step_flops
from tests.distributed import models
from tests.distributed.harness import Ranks
from tests.ledger import sent_by_pair

BF16, FP32 = 2, 4
SHAPES = models.shapes()
EVEN = models.shapes(models.EVEN_SHAPES)  # FSDP over TP needs even dims


def cost_of(matrix: Matrix) -> float:
    return float(ns_step_flops(*matrix.shape))


def count(
    rank: int,
    world_size: int,
    layout: str,
    shapes: dict[str, tuple[int, ...]],
    bucket_bytes: int,
    observes: bool,
) -> tuple[float, int]:
    """Bytes that this rank sends in a step: counted, and by the ledger."""
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
    for step in (1, 2):  # counted anew
        models.set_gradients(model, 1, step)
        drawn = set(optimizer.source.sample(step)) if step == 2 else set()
        optimizer.step()
    assert bool(drawn) == observes
    expected = 0
    (jobs,) = assign(matrices, list(map(cost_of, matrices))).values()
    for (source, _), volume in sent_by_pair(matrices, jobs, world_size).items():
        expected += BF16 * volume.elements * (source == rank)
    # Sampled matrices are gathered once more, in the dtype of momentum; nothing is delivered.
    sampled = [matrix for matrix in matrices if matrix.name in drawn]
    for jobs in assign(sampled, list(map(cost_of, sampled))).values():
        for (source, _), volume in sent_by_pair(sampled, jobs, world_size).items():
            expected += FP32 * volume.gathered * (source == rank)
    return optimizer.metrics()["exchange/sent_bytes"], expected


@pytest.mark.parametrize(
    ("layout", "world_size", "shapes", "bucket_bytes", "observes"),
    [
        pytest.param("fsdp", 1, SHAPES, 2**20, False, id="one-process"),
        pytest.param("fsdp", 4, SHAPES, 64, False, id="fsdp-4-uneven-and-empty"),
        pytest.param("tp", 3, SHAPES, 64, False, id="tp-3-uneven"),
        pytest.param("tp_fsdp", 4, EVEN, 2**20, False, id="tp-2-fsdp-2"),
        pytest.param("plain", 3, SHAPES, 64, False, id="ddp-3"),
        pytest.param("fsdp", 4, SHAPES, 2**20, True, id="fsdp-4-observed"),
        pytest.param("hsdp", 4, SHAPES, 2**20, True, id="hsdp-2x2-observed"),
    ],
)
def test_ranks_send_what_the_ledger_says(
    run_on: Ranks,
    layout: str,
    world_size: int,
    shapes: dict[str, tuple[int, ...]],
    bucket_bytes: int,
    observes: bool,
) -> None:
    results = run_on(world_size)(count, layout, shapes, bucket_bytes, observes)
    for sent, expected in results:
        assert sent == expected
    assert any(sent for sent, _ in results) == (world_size > 1)
