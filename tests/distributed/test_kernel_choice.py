"""Ranks whose clocks disagree choose the same kernels, and wait for nothing after that."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

from amo_dist import AMO, AMOConfig, param_groups
from amo_dist.kernels import choice
from tests import rehearsal
from tests.distributed import models
from tests.distributed.harness import Ranks

CANDIDATES = ("standard", "single", "symmetric")
CONFIG = AMOConfig(observe_until=2, observe_every=1, transition_steps=2, ns_dtype="float32")
LOCKED = 5
"""The step in which schedules have come to stay, and kernels are measured."""


def train(rank: int, world_size: int) -> tuple[dict[str, str], dict[str, float]]:
    """The kernels that a rank keeps, and its metrics."""

    def clock(_: object, name: str, *__: object) -> tuple[float, float]:
        # ``single`` is fast on rank 1 alone.
        return {"single": 2.0 - 1.9 * rank, "symmetric": 0.6}.get(name, 1.0), 1e-6

    shapes = models.shapes(models.EVEN_SHAPES)
    with (
        rehearsal.on_devices(*CANDIDATES),
        rehearsal.nccl(),
        mock.patch.object(choice, "_measure", clock),
    ):
        model = models.make_model("fsdp", shapes)
        optimizer = AMO(param_groups(model), lr=3e-3, config=CONFIG)
        for step in range(1, 12):
            models.set_gradients(model, 7, step)
            with rehearsal.Steps() if step > LOCKED else contextlib.nullcontext():
                optimizer.step()
        kept: dict[str, Any] = optimizer.control_state_dict()["kernels"]
        return kept, optimizer.metrics()


def test_ranks_choose_the_same_kernels(run_on: Ranks) -> None:
    (kept, metrics), (others, _) = run_on(2)(train)
    assert kept == others
    assert {*kept.values()} == {"symmetric"}
    assert {key.partition(",")[0] for key in kept} == {"16x8", "4x8", "8x16", "24x8", "8x24"}
    assert metrics["newton_schulz/symmetric_matrices"] == 7 * models.NUM_LAYERS
