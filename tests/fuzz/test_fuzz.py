"""The short form; ``python -m tests.fuzz`` is the long one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from amo_dist.kernels.newton_schulz import step_sizes
from amo_dist.schedule.coefficients import named_schedule
from tests.distributed import models
from tests.distributed.harness import Ranks
from tests.faults.series import run_series
from tests.fuzz.cases import NAMES, Case, check, trial


@pytest.mark.parametrize("number", [8, pytest.param(60, marks=pytest.mark.slow)])
def test_ranks_one_process_and_the_twin_end_alike(run_on: Ranks, number: int) -> None:
    events = run_series(lambda rng: trial(rng, run_on), range(number), seed=7)
    assert events["with twin"] > number // 4


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
PAIRS = {"feed_forward.w1.weight": (320, 128), "feed_forward.w2.weight": (128, 320)}
"""Long enough for pairs of Newton-Schulz steps as a whole, and too short in two halves."""


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


@pytest.mark.parametrize(("layout", "dtype"), [("fsdp", "bfloat16"), ("tp", "float16")])
def test_whole_shapes_decide_on_pairs_of_steps(run_on: Ranks, layout: str, dtype: str) -> None:
    arguments = (named_schedule("kj").schedule.coefficients, getattr(torch, dtype))
    assert 2 in step_sizes("auto", (320, 128), *arguments, torch.device("cpu"))
    assert 2 not in step_sizes("auto", (160, 128), *arguments, torch.device("cpu"))
    shapes = models.shapes(PAIRS)
    check(Case(2, layout, "Muon", shapes, "float32", {"ns_dtype": dtype}, True), run_on)
