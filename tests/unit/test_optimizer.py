"""The optimizer on one process: what a user may do with it, and bad numbers."""

from __future__ import annotations

import math
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from amo_dist import (
    OPTIMIZER_NAMES,
    AdaMuon,
    AMOConfig,
    Muon,
    MuonConfig,
    NonFiniteGradientError,
    NonFiniteUpdateError,
    Schedule,
    make_optimizer,
    param_groups,
)
from amo_dist.engine.ballot import LARGEST_GRADIENT
from amo_dist.kernels.newton_schulz import orthogonalize
from tests import runs
from tests.distributed import models
from tests.runs import NORM, SHAPES, W1, WQ
from tests.simulated_device import simulated_device

# ---------------------------------------------------------------- bad numbers


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e38])
@pytest.mark.parametrize("name", list(SHAPES))
def test_an_unusable_gradient_changes_nothing(name: str, value: float) -> None:
    for rule in ("error", "skip_step"):
        model, optimizer = runs.make(nonfinite=rule)
        runs.train(model, optimizer)
        before = runs.everything(model, optimizer)
        models.set_gradients(model, 1, 4)
        grad = model.get_parameter(name).grad
        assert grad is not None
        grad.view(-1)[-1] = value
        if rule == "error":
            with pytest.raises(NonFiniteGradientError, match=f"{name}: .*on rank 0.*skip_step"):
                optimizer.step()
            assert optimizer.num_steps_taken == 3
        else:
            optimizer.step()
            assert optimizer.num_steps_taken == 4
            assert optimizer.metrics()["optimizer/steps_skipped"] == 1
        assert all(map(torch.equal, runs.everything(model, optimizer), before))


# Powers of two, for which all roundings are the same: about 8e-31 and 1e30.
@pytest.mark.parametrize("scale", [2.0**-100, 2.0**100])
def test_the_scale_of_matrix_gradients_does_not_matter(scale: float) -> None:
    results = []
    for factor in (1.0, scale):
        model, optimizer = runs.make(kind=Muon, shapes={WQ: (12, 8)})
        for step in range(1, 40):
            grad = models.gradient(1, step, WQ, (12, 8)).sign()
            model.get_parameter(WQ).grad = grad * factor
            optimizer.step()
        results.append(runs.weights(model))
    assert runs.equal(*results)


@pytest.mark.parametrize("scale", [2.0**-34, 1.0])
def test_a_run_says_where_the_papers_tau_counts(
    scale: float, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = runs.make(planner="paper")
    for step in (1, 2):
        models.set_gradients(model, 1, step)
        for param in model.parameters():
            param.grad *= scale  # type: ignore[operator]
        optimizer.step()
    assert ("tau" in caplog.text) == (scale < 1.0)


def test_an_update_that_diverges_is_left_out_and_named_at_the_next_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A checkpoint that lacks it says so."""
    # The next updates of attn_q are NaN.
    model = models.plain_model({WQ: (12, 8), W1: (13, 8)})
    schedules = {"attn_q": (1e30, 0.0, 0.0), "mlp_gate": (1.5, -0.5, 0.0)}
    schedule = {kind: Schedule((triple,) * 2) for kind, triple in schedules.items()}
    optimizer = Muon(param_groups(model), lr=1e-2, schedule=schedule)
    models.set_gradients(model, 1, 1)
    before = runs.weights(model)
    optimizer.check_last_update()
    optimizer.state_dict()
    assert not caplog.records
    optimizer.step()
    assert torch.equal(model.get_parameter(WQ), before[WQ] * (1 - 1e-2 * 0.1))
    after = runs.everything(model, optimizer)
    state = optimizer.state_dict()
    (record,) = caplog.records
    assert record.message.startswith(f"{WQ}: the last update of this matrix was NaN or inf")
    for look in (optimizer.check_last_update, optimizer.check_last_update, optimizer.step):
        with pytest.raises(NonFiniteUpdateError, match=f"{WQ}: .*attn_q.*rank 0.*the first of 1"):
            look()
    assert all(map(torch.equal, runs.everything(model, optimizer), after))
    optimizer.load_state_dict(state)
    optimizer.check_last_update()


def test_a_missing_gradient_skips_the_parameter() -> None:
    model, optimizer = runs.make()
    runs.train(model, optimizer)
    before = runs.weights(model)
    state = {key: value.clone() for key, value in optimizer.state[model.get_parameter(WQ)].items()}
    models.set_gradients(model, 1, 4, missing=frozenset({WQ, "tok_embeddings.weight"}))
    optimizer.step()
    for name, value in runs.weights(model).items():
        assert torch.equal(value, before[name]) == (name in (WQ, "tok_embeddings.weight")), name
    assert torch.equal(optimizer.state[model.get_parameter(WQ)]["momentum_buffer"], *state.values())


# ---------------------------------------------------------------- what users do


def test_a_closure_is_called_once_with_gradients_enabled() -> None:
    model, optimizer = runs.make(kind=Muon)
    calls = []

    def closure() -> float:
        assert torch.is_grad_enabled()
        models.set_gradients(model, 1, 1)
        calls.append(1)
        return 2.5

    with torch.no_grad():
        assert optimizer.step(closure) == 2.5
    assert calls == [1]
    assert runs.equal(runs.weights(model), runs.train(*runs.make(kind=Muon), 1, 1))


def test_groups_may_be_split_with_rates_and_without_decay() -> None:
    model = models.plain_model(SHAPES)
    (matrices, rest) = param_groups(model)
    q, _, gate = matrices["params"]
    split = [
        {**matrices, "params": [q], "muon_lr_factor": 0.5, "weight_decay": 0.0},
        {**matrices, "params": [gate]},
        {**rest, "weight_decay": 0.0, "muon_lr_factor": 0.0},
    ]
    optimizer = Muon(split, lr=1e-2)
    found = runs.train(model, optimizer)
    # In a run of its own, the first at half the rate and without decay, each has the same bits.
    for (name, _), options in ((q, {"lr": 5e-3, "weight_decay": 0.0}), (gate, {"lr": 1e-2})):
        twin = models.plain_model(SHAPES)
        lone = Muon(param_groups(twin)[:1], **options)
        runs.train(twin, lone)
        assert torch.equal(found[name], twin.get_parameter(name)), name
    for name in ("tok_embeddings.weight", NORM):
        assert torch.equal(found[name], models.initial(name, SHAPES[name])), name


def test_bf16_parameters_have_fp32_momentum() -> None:
    model, optimizer = runs.make(dtype=torch.bfloat16)
    runs.train(model, optimizer, 1, 2)
    momentum = optimizer.state[model.get_parameter(WQ)]["momentum_buffer"]
    # A sum of bf16 gradients is no bf16 number: what is kept is not a widened bf16 buffer.
    assert not torch.equal(momentum, momentum.bfloat16().float())


def test_matrices_of_one_shape_and_schedule_are_orthogonalized_together() -> None:
    names = ("attention.wq", "feed_forward.w1")
    shapes = {f"layers.{i}.{name}.weight": (8, 12) for i in range(3) for name in names}
    shapes["layers.0.feed_forward.w2.weight"] = (12, 8)
    spy = mock.patch("amo_dist.engine.step.orthogonalize", side_effect=orthogonalize)
    with simulated_device(), spy as called:
        runs.train(*runs.make(kind=Muon, shapes=shapes, device="cuda", ns_guard_every=0), 1, 1)
    found = [tuple(call.args[0].shape) for call in called.call_args_list]
    assert sorted(found, key=len) == [(12, 8), (6, 8, 12)]


# ---------------------------------------------------------------- the hot path


def test_a_locked_step_writes_no_control_text() -> None:
    model, optimizer = runs.make()
    runs.train(model, optimizer, 1, 8)
    with mock.patch("amo_dist.state.control.to_text") as spy:
        runs.train(model, optimizer, 9, 9)
    assert not spy.called


# ---------------------------------------------------------------- the bound on gradients


@pytest.mark.parametrize("kind", [Muon, AdaMuon])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16, torch.float64])
def test_the_largest_gradient_leaves_state_finite(kind: type[Muon], dtype: torch.dtype) -> None:
    model = nn.Linear(4, 4).to(dtype)
    optimizer = kind(param_groups(model, patterns={"weight": "mlp_up"}), lr=0.1, eps=1e-4)
    most = torch.finfo(dtype).max
    for _ in range(50):
        model.weight.grad = torch.full_like(model.weight, min(LARGEST_GRADIENT, most))
        model.bias.grad = torch.full_like(model.bias, math.sqrt(most) / 2.1)
        optimizer.step()
    for state in optimizer.state.values():
        assert all(value.isfinite().all() for value in state.values())
    model.bias.grad *= 4
    with pytest.raises(NonFiniteGradientError, match="bias"):
        optimizer.step()


def test_a_skipped_observation_is_invalid_and_planning_goes_on() -> None:
    with simulated_device() as device:
        model, optimizer = runs.make(device="cuda", nonfinite="skip_step")
        state = [value for own in optimizer.state.values() for value in own.values()]
        for step in range(1, 9):
            models.set_gradients(model, 1, step)
            if step == 2:
                model.get_parameter(runs.WQ).grad.fill_(math.nan)
            optimizer.step()
            kept = [*model.parameters(), *(p.grad for p in model.parameters()), *state]
            assert device.held_bytes(without=kept) < 256, step  # flags and norms
        assert optimizer.metrics()["amo/invalid_observations"] == 3
        first, second = optimizer.control_state_dict()["source"]["observations"]
    assert first["ell"] == {"attn_q": None, "mlp_gate": None}
    assert None not in second["ell"].values()
    assert optimizer.phase == "locked"


def train(name: str, device: str | None) -> dict[str, Tensor]:
    model = models.plain_model(models.shapes())
    fields = {"ns_guard_every": 1}
    phases = {"observe_until": 2, "observe_every": 1, "transition_steps": 1}
    config = AMOConfig(**fields, **phases) if name == "AMO" else MuonConfig(**fields)
    with nullcontext() if device is None else torch.device(device):
        optimizer = make_optimizer(name, param_groups(model), config=config)
    for step in range(1, 5):
        models.set_gradients(model, 0, step)
        with nullcontext() if device is None else torch.device(device):
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
    return runs.weights(model)


@pytest.mark.parametrize("name", [name for name in OPTIMIZER_NAMES if name != "AdamW"])
def test_the_default_device_has_no_part(name: str) -> None:
    assert runs.equal(train(name, "meta"), train(name, None))
