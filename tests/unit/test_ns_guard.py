"""The guard that measures what Newton-Schulz leaves of one matrix in turn."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from amo_dist import Muon, MuonConfig, param_groups
from amo_dist.engine.observe import matrix_to_check
from amo_dist.kernels.newton_schulz import orthogonalize
from amo_dist.kernels.spectrum import ns_residual
from amo_dist.schedule.coefficients import named_schedule
from amo_dist.schedule.types import MatrixInfo, Schedule
from tests import runs
from tests.distributed import models
from tests.distributed.harness import Ranks

SHAPES = {
    "layers.0.attention.wq.weight": (6, 8),
    "layers.0.attention.wk.weight": (4, 8),
    "layers.0.attention.wo.weight": (8, 6),
}
DOUBLES = Schedule(((2.0, 0.0, 0.0),) * 2, norm_scale=1.0)
"""Four times the matrix over its norm: a residual of 15 where one singular value is all."""


def make(**fields: Any) -> tuple[nn.Module, Muon]:
    """A model, and an optimizer that doubles its updates."""
    model = models.plain_model(SHAPES)
    return model, Muon(param_groups(model), schedule=DOUBLES, config=MuonConfig(**fields))


def fill_gradients(model: nn.Module, value: float = 1.0) -> None:
    """Gradients of rank one."""
    for param in model.parameters():
        param.grad = torch.full_like(param, value)


def test_the_largest_matrix_begins_and_then_all_take_turns() -> None:
    registry = [MatrixInfo(name, (2, 2 + index), "attn_q") for index, name in enumerate("abc")]
    names = [matrix_to_check(registry, step, 2) for step in range(1, 9)]
    assert names == ["c", "a", None, "b", None, "c", None, "a"]
    assert matrix_to_check([], 1, 2) is None


def test_a_diverging_schedule_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = make(ns_guard_every=0)
    fill_gradients(model)
    optimizer.step()
    assert not caplog.records
    model, optimizer = make(ns_guard_every=3)
    messages = []
    for _ in range(3):
        caplog.clear()
        fill_gradients(model)
        optimizer.step()
        messages.append(caplog.text)
    first, between, message = messages
    assert "WARNING" in first
    assert not between
    assert "step 3: layers.0.attention.wk.weight, of type attn_k" in message
    # One singular value of 4, and three of zero: sqrt((15^2 + 3) / 4).
    assert "residual of 7.55" in message
    assert "above 1.1, by 2 steps: Schedule(coefficients=((2.0, 0.0, 0.0), " in message
    assert "uniform" not in message
    assert optimizer.metrics()["newton_schulz/residual"] == pytest.approx(math.sqrt(228 / 4))


def test_what_is_measured_is_the_update_that_was_applied() -> None:
    fields = {"ns_dtype": "bfloat16", "ns_guard_every": 1}
    model, optimizer = runs.make(kind=Muon, shapes=SHAPES, **fields)
    assert optimizer.metrics()["newton_schulz/residual"] == 0.0
    name, kj = "layers.0.attention.wo.weight", named_schedule("kj").schedule
    momentum = models.gradient(1, 1, name, SHAPES[name])
    ahead = (momentum * 0.95 + momentum).to(torch.bfloat16)
    update = orthogonalize(ahead, kj.coefficients, norm_scale=kj.norm_scale)
    runs.train(model, optimizer, 1, 1)
    assert optimizer.metrics()["newton_schulz/residual"] == float(ns_residual(update))


def residual(rank: int, world_size: int, layout: str) -> float:
    model, optimizer = runs.make(layout, Muon, ns_guard_every=1)
    runs.train(model, optimizer, 1, 2)
    return optimizer.metrics()["newton_schulz/residual"]


def test_ranks_that_check_no_matrix_know_its_residual(run_on: Ranks) -> None:
    assert run_on(2)(residual, "fsdp") == [residual(0, 1, "plain")] * 2


def test_zeros_and_skipped_steps_say_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("amo_dist.optimizers.muon.GUARD_BOUND", 0.5)
    model = models.plain_model({"layers.0.attention.wq.weight": (6, 8)})
    config = MuonConfig(ns_guard_every=1, nonfinite="skip_step")
    optimizer = Muon(param_groups(model), schedule=DOUBLES, config=config)
    # The one matrix has its turn at every step: what the first left must not be told again.
    for value, is_told in ((0.0, False), (1.0, True), (math.nan, False)):
        fill_gradients(model, value)
        caplog.clear()
        optimizer.step()
        assert ("residual" in caplog.text) == is_told
        assert (optimizer.metrics()["newton_schulz/residual"] > 0.0) == is_told
