"""Every optimizer by name, sharded and whole, against the single-process twin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from amo_dist import Muon, param_groups
from amo_dist.optimizers.named import make_optimizer
from amo_dist.schedule.coefficients import named_schedule
from amo_dist.schedule.source import Fixed
from amo_dist.schedule.types import MatrixInfo
from tests import runs
from tests.distributed import models
from tests.distributed.harness import Ranks
from tests.distributed.test_ranks import raised
from tests.distributed.twin import LR, WEIGHT_DECAY
from tests.fuzz.cases import NAMES, Case, check

AMO_FIELDS: dict[str, Any] = {
    "observe_until": 2,
    "observe_every": 1,
    "sample_size": 2,
    "transition_steps": 2,
}
SUMS = [
    *(("AdaMuon", "plain", 2), ("AdaMuon", "tp_fsdp", 4)),
    *(("NorMuon", "tp", 3), ("NorMuon", "hsdp", 4), ("NorMuon", "tp_fsdp", 4)),
]
"""Optimizers with sums over whole matrices."""


@pytest.mark.parametrize(
    ("name", "layout", "world_size", "head_dim"),
    [
        *((name, "fsdp", 3, 0) for name in NAMES),
        *((*one, head_dim) for one in SUMS for head_dim in (0, 4)),
    ],
)
def test_one_process_and_shards_equal_the_twin(
    run_on: Ranks, name: str, layout: str, world_size: int, head_dim: int
) -> None:
    # Small buckets: the tiny matrices of these tests fill several.
    fields = {"bucket_bytes": 256} | (AMO_FIELDS if name == "AMO" else {})
    shapes = models.shapes(models.EVEN_SHAPES if head_dim else models.SHAPES)
    check(Case(world_size, layout, name, shapes, "float32", fields, True, head_dim), run_on)


def train_adamw(rank: int, world_size: int) -> bool:
    """Whether it ends as PyTorch's own on whole parameters."""
    model, twin = (models.make_model(layout, models.shapes()) for layout in ("fsdp", "plain"))
    found = runs.train(model, make_optimizer("AdamW", param_groups(model), LR, WEIGHT_DECAY), 1, 6)
    own = torch.optim.AdamW(twin.parameters(), LR, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY)
    expected = runs.train(twin, own, 1, 6)
    # PyTorch's foreach kernel rounds a fused multiply-add differently at the end of a shard.
    return all(
        bool((found[name] - value).abs().max() <= 6 * 2.0**-23 * value.abs().max())
        for name, value in expected.items()
    )


def test_adamw_on_shards_is_that_of_pytorch(run_on: Ranks) -> None:
    assert run_on(3)(train_adamw) == [True] * 3


class FailingSource(Fixed):
    """It cannot run on one rank."""

    def bind(self, registry: Sequence[MatrixInfo]) -> None:
        if dist.get_rank() == 1:
            raise ZeroDivisionError("no fit")
        super().bind(registry)


def fail_to_bind(rank: int, world_size: int) -> str:
    model = models.make_model("fsdp", models.shapes())
    source = FailingSource({}, named_schedule("kj").schedule)
    optimizer = Muon(param_groups(model), LR, schedule=source)
    return raised(lambda: runs.train(model, optimizer, 1, 1))


def test_a_source_that_fails_on_one_rank_fails_on_all(run_on: Ranks) -> None:
    errors = run_on(3)(fail_to_bind)
    assert errors[0].startswith("RuntimeError: ")
    assert "failed on rank 1: ZeroDivisionError: no fit" in errors[0]
    assert errors == errors[:1] * 3
