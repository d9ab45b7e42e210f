"""Whole shapes decide on pairs of Newton-Schulz steps in 16 bits: layouts have the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from amo_dist import Muon, MuonConfig, param_groups
from amo_dist.kernels.newton_schulz import step_sizes
from amo_dist.schedule.polar_express import schedule_for
from tests import runs
from tests.distributed import models
from tests.distributed.harness import Ranks

# Long enough for pairs as a whole, and too short in two halves.
SHAPES = {"feed_forward.w1.weight": (320, 128), "feed_forward.w2.weight": (128, 320)}
SCHEDULE = schedule_for(1e-3, 5)


def train(rank: int, world_size: int, layout: str, dtype: str) -> dict[str, Tensor]:
    """Whole parameters after two steps."""
    model = models.make_model(layout, models.shapes(SHAPES))
    config = MuonConfig(ns_dtype=dtype)
    optimizer = Muon(param_groups(model), lr=1e-2, schedule=SCHEDULE, config=config)
    return runs.train(model, optimizer, 1, 2, seed=7)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("layout", ["fsdp", "tp"])
def test_shards_equal_one_process(run_on: Ranks, layout: str, dtype: str) -> None:
    arguments = (SCHEDULE.coefficients, getattr(torch, dtype), torch.device("cpu"))
    assert 2 in step_sizes("auto", (320, 128), *arguments)
    assert 2 not in step_sizes("auto", (160, 128), *arguments)
    (expected,) = run_on(1)(train, "plain", dtype)
    for found in run_on(2)(train, layout, dtype):
        assert runs.equal(found, expected)
