"""The short form; ``python -m tests.fuzz`` is the long one."""

from __future__ import annotations

import pytest
import torch

from amo_dist.kernels.newton_schulz import step_sizes
from amo_dist.schedule.coefficients import named_schedule
from tests.distributed import models
from tests.distributed.harness import Ranks
from tests.faults.series import run_series
from tests.fuzz.cases import NAMES, Case, check, trial


@pytest.mark.parametrize(
    "numbers", [range(24), pytest.param(range(24, 60), marks=pytest.mark.slow)]
)
def test_ranks_one_process_and_the_twin_end_alike(run_on: Ranks, numbers: range) -> None:
    events = run_series(lambda rng: trial(rng, run_on), numbers, seed=1)
    assert events["with twin"] > len(numbers) // 4
    assert events.keys() >= set(NAMES)


PAIRS = {"feed_forward.w1.weight": (320, 128), "feed_forward.w2.weight": (128, 320)}
"""Long enough for pairs of Newton-Schulz steps as a whole, and too short in two halves."""


@pytest.mark.parametrize(("layout", "dtype"), [("fsdp", "bfloat16"), ("tp", "float16")])
def test_whole_shapes_decide_on_pairs_of_steps(run_on: Ranks, layout: str, dtype: str) -> None:
    arguments = (named_schedule("kj").schedule.coefficients, getattr(torch, dtype))
    assert 2 in step_sizes("auto", (320, 128), *arguments, torch.device("cpu"))
    assert 2 not in step_sizes("auto", (160, 128), *arguments, torch.device("cpu"))
    shapes = models.shapes(PAIRS)
    check(Case(2, layout, "Muon", shapes, "float32", {"ns_dtype": dtype}, True), run_on)
