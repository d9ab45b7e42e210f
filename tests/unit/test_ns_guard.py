"""The guard that measures what Newton-Schulz leaves of one matrix in turn."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch import nn

from amo_dist import Muon, MuonConfig, param_groups
from amo_dist.engine.observe import matrix_to_check
from amo_dist.kernels.newton_schulz import orthogonalize
from amo_dist.kernels.spectrum import ns_residual
from amo_dist.schedule.coefficients import named_schedule
from amo_dist.schedule.types import MatrixInfo, Schedule

SHAPES = {
    "attention.wq.weight": (6, 8),
    "attention.wk.weight": (4, 8),
    "attention.wo.weight": (8, 6),
}
DOUBLES = Schedule(((2.0, 0.0, 0.0),) * 2, norm_scale=1.0)
"""Four times the matrix over its norm: a residual of 15 where one singular value is all."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({"0": nn.Module()})
        for name, shape in SHAPES.items():
            module, _, leaf = name.rpartition(".")
            here = self.layers["0"]
            for part in module.split("."):
                if not hasattr(here, part):
                    here.add_module(part, nn.Module())
                here = getattr(here, part)
            here.register_parameter(leaf, nn.Parameter(torch.randn(shape)))


def gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator)


def rank_one(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = torch.ones_like(param)


def test_all_matrices_take_turns() -> None:
    registry = [MatrixInfo(name, (2, 2), "attn_q") for name in "abc"]
    assert [matrix_to_check(registry, turn) for turn in range(1, 5)] == ["a", "b", "c", "a"]
    assert matrix_to_check([], 1) is None


def test_a_diverging_schedule_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    config = MuonConfig(ns_guard_every=2, ns_dtype="float32")
    optimizer = Muon(param_groups(model), schedule=DOUBLES, config=config)
    for step in (1, 2):
        caplog.clear()
        rank_one(model)
        optimizer.step()
        assert bool(caplog.records) == (step == 2)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    message = record.getMessage()
    assert "step 2: layers.0.attention.wk.weight, of type attn_k" in message
    # One singular value of 4, and three of zero: sqrt((15^2 + 3) / 4).
    assert "residual of 7.55" in message
    assert "above 1.1, by the 2 steps (2, 0, 0) (2, 0, 0)" in message
    assert "uniform" not in message
    assert optimizer.metrics()["newton_schulz/residual"] == pytest.approx(math.sqrt(228 / 4))


def test_what_is_measured_is_the_update_that_was_applied() -> None:
    model = Model()
    optimizer = Muon(param_groups(model), config=MuonConfig(ns_dtype="bfloat16", ns_guard_every=1))
    assert optimizer.metrics()["newton_schulz/residual"] == 0.0
    gradients(model, 1)
    momentum = model.get_parameter("layers.0.attention.wk.weight").grad
    assert momentum is not None
    kj = named_schedule("kj").schedule
    assert kj is not None
    ahead = (momentum * 0.95 + momentum).to(torch.bfloat16)
    update = orthogonalize(ahead, kj.coefficients, norm_scale=kj.norm_scale)
    optimizer.step()
    assert optimizer.metrics()["newton_schulz/residual"] == float(ns_residual(update))


@pytest.mark.parametrize("every", [0, 3])
def test_the_guard_is_silent_between_its_steps(
    every: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model()
    config = MuonConfig(ns_guard_every=every)
    optimizer = Muon(param_groups(model), schedule=DOUBLES, config=config)
    for _ in range(2):
        rank_one(model)
        optimizer.step()
    assert not caplog.records
    assert optimizer.metrics()["newton_schulz/residual"] == 0.0


def test_zeros_and_skipped_steps_say_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("amo_dist.optimizers.muon.GUARD_BOUND", 0.5)
    model = Model()
    del model.layers["0"].attention.wk, model.layers["0"].attention.wo
    config = MuonConfig(ns_guard_every=1, nonfinite="skip_step")
    optimizer = Muon(param_groups(model), schedule=DOUBLES, config=config)
    # The one matrix has its turn at every step: what the first left must not be told again.
    for value, is_told in ((0.0, False), (1.0, True), (math.nan, False)):
        for param in model.parameters():
            param.grad = torch.full_like(param, value)
        caplog.clear()
        optimizer.step()
        assert ("residual" in caplog.text) == is_told
        assert (optimizer.metrics()["newton_schulz/residual"] > 0.0) == is_told
