"""Updates of the exact norm: the same on shards as in one process."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from amo_dist import Muon, MuonConfig, param_groups
from tests.distributed import models
from tests.distributed.harness import Ranks
from tests.distributed.test_teams import UNEVEN, Shapes

SEED, STEPS, LR = 7, 4, 1e-2
FIELDS: dict[str, Any] = {"update_norm": "exact", "bucket_bytes": 256}


def train(
    rank: int, world_size: int, layout: str, fields: dict[str, Any], shapes: Shapes | None = None
) -> tuple[dict[str, Tensor], bool]:
    """Whole parameters after some steps, and whether this rank shares a matrix."""
    model = models.make_model(layout, shapes or models.shapes())
    group = dist.group.WORLD if layout == "plain" and world_size > 1 else None
    config = MuonConfig(**fields)
    optimizer = Muon(param_groups(model), lr=LR, config=config, process_group=group)
    # Small matrices are shared, too, where sending takes no time.
    with mock.patch("amo_dist.distributed.teams.FLOPS_PER_BYTE", 0):
        for step in range(1, STEPS + 1):
            models.set_gradients(model, SEED, step)
            optimizer.step()
    jobs = [
        job
        for exchange in optimizer._engine._exchanges
        for bucket in (*exchange.plan.buckets, *exchange.plan.local)
        for job in bucket.jobs
    ]
    shares = any(job.team for job in jobs)
    return {name: models.whole(param) for name, param in model.named_parameters()}, shares


CASES = [
    pytest.param("fsdp", 3, id="fsdp-3"),
    pytest.param("hsdp", 4, id="hsdp-2x2"),
]


@pytest.mark.parametrize(("layout", "world_size"), CASES)
def test_shards_equal_one_process_bit_for_bit(run_on: Ranks, layout: str, world_size: int) -> None:
    ((expected, _),) = run_on(1)(train, "plain", FIELDS)
    ((as_is, _),) = run_on(1)(train, "plain", {**FIELDS, "update_norm": "as_is"})
    assert any(not torch.equal(as_is[name], expected[name]) for name in models.types())
    for found, shares in run_on(world_size)(train, layout, FIELDS):
        assert not shares
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


@pytest.mark.parametrize(("layout", "world_size"), [("plain", 4)])
def test_teams_equal_one_process_to_rounding(run_on: Ranks, layout: str, world_size: int) -> None:
    fields = {**FIELDS, "ns_dtype": "float32"}
    ((expected, _),) = run_on(1)(train, "plain", fields, UNEVEN)
    results = run_on(world_size)(train, layout, {**fields, "max_team": 2}, UNEVEN)
    assert any(shares for _, shares in results)
    for found, _ in results:
        for name, value in expected.items():
            # Some 1e-5 of an orthogonal matrix, times the learning rate and the scale of updates.
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
