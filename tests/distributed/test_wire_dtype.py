"""Matrices travel in a dtype of their own, and give what they give in one process."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from amo_dist import Muon, MuonConfig, param_groups
from amo_dist.engine import observe
from tests.distributed import models
from tests.distributed.harness import Ranks


def train(
    rank: int, world_size: int, layout: str, fields: dict[str, Any]
) -> tuple[dict[str, Tensor], Counter[torch.dtype], float, float]:
    """Whole parameters, dtypes in which residuals were measured, and what one step sent."""
    model = models.make_model(layout, models.shapes())
    config = MuonConfig(ns_guard_every=1, bucket_bytes=256, **fields)
    optimizer = Muon(param_groups(model), lr=1e-2, config=config)
    measured = Counter[torch.dtype]()

    def residual(found: Tensor) -> Tensor:
        measured[found.dtype] += 1
        return torch.zeros(())

    with mock.patch.object(observe, "ns_residual", residual):
        for step in range(1, 5):
            models.set_gradients(model, 7, step)
            optimizer.step()
    whole = {name: models.whole(param) for name, param in model.named_parameters()}
    elements = float(sum(sum(counts.values()) for counts in optimizer._engine._sent))
    num_bytes = elements * optimizer._engine.wire.itemsize
    return whole, measured, elements, num_bytes


@pytest.mark.parametrize(
    ("layout", "world_size", "fields", "size"),
    [
        ("fsdp", 2, {"ns_dtype": "float16"}, 2),
        ("fsdp", 2, {"ns_dtype": "float16", "wire_dtype": "float32"}, 4),
        ("tp", 2, {"ns_dtype": "float32", "wire_dtype": "bfloat16"}, 2),
    ],
)
def test_shards_equal_one_process_in_any_two_dtypes(
    run_on: Ranks, layout: str, world_size: int, fields: dict[str, Any], size: int
) -> None:
    ((expected, *_),) = run_on(1)(train, "plain", fields)
    for found, measured, elements, num_bytes in run_on(world_size)(train, layout, fields):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=name)
        # Ranks measure residuals in turn, and see what Newton-Schulz gave.
        assert set(measured) == {getattr(torch, fields["ns_dtype"])}
        assert num_bytes == size * elements > 0
