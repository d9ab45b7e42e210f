"""Starting from the state of other optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from amo_dist import AMO, AMOConfig, import_state, param_groups
from tests.distributed import models
from tests.unit.checkpoint_runs import everything

SHAPES = {
    "tok_embeddings.weight": (5, 8),
    "layers.0.attention.wq.weight": (12, 8),
    "layers.0.feed_forward.w1.weight": (13, 8),
    "norm.weight": (8,),
}
WQ = "layers.0.attention.wq.weight"


def make(**fields: Any) -> tuple[nn.Module, AMO]:
    model = models.plain_model(SHAPES)
    return model, AMO(param_groups(model), lr=1e-2, config=AMOConfig(**fields))


def matrices_of(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, param) for name, param in model.named_parameters() if "layers" in name]


def test_momentum_of_torch_muon_is_carried_over_exactly() -> None:
    model = models.plain_model(SHAPES)
    named = matrices_of(model)
    theirs = torch.optim.Muon(named, lr=0.0, momentum=0.95)
    ours_model, ours = make()
    for step in range(1, 6):
        models.set_gradients(model, 1, step)
        models.set_gradients(ours_model, 1, step)
        theirs.step()
        ours.step()
    fresh_model, fresh = make()
    report = import_state(fresh, theirs.state_dict())
    assert set(report.mapped) == {name for name, _ in named}
    assert set(report.untouched) == {"tok_embeddings.weight", "norm.weight"}
    assert report.unused == ()
    for name, _ in named:
        found = fresh.state[fresh_model.get_parameter(name)]["momentum_buffer"]
        expected = ours.state[ours_model.get_parameter(name)]["momentum_buffer"]
        # Rounding of five lerps in fp32, against sums: a few ulp of entries up to about 10.
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5), name
    assert fresh.num_steps_taken == 0
    assert fresh.phase == "observation"


def test_moments_of_adamw_are_carried_over() -> None:
    model = models.plain_model(SHAPES)
    theirs = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    constant = {name: models.gradient(1, 1, name, shape) for name, shape in SHAPES.items()}
    for _ in range(7):
        for name, param in model.named_parameters():
            param.grad = constant[name].clone()
        theirs.step()
    fresh_model, fresh = make()
    report = import_state(
        fresh, theirs.state_dict(), names=[name for name, _ in model.named_parameters()]
    )
    assert set(report.mapped) == set(SHAPES)
    for name in ("tok_embeddings.weight", "norm.weight"):
        found = fresh.state[fresh_model.get_parameter(name)]
        expected = theirs.state[model.get_parameter(name)]
        assert all(torch.equal(found[key], expected[key]) for key in found)
    # Of a constant gradient the buffer is a sum of twenty, its limit for momentum 0.95.
    found = fresh.state[fresh_model.get_parameter(WQ)]["momentum_buffer"]
    # exp_avg and its correction are rounded seven times.
    assert torch.allclose(found, 20 * constant[WQ], rtol=2e-6, atol=0)


def test_what_cannot_be_mapped_is_reported_and_errors_change_nothing() -> None:
    model = models.plain_model(SHAPES)
    theirs = torch.optim.SGD(model.named_parameters(), lr=0.0, momentum=0.9)
    models.set_gradients(model, 1, 1)
    theirs.step()
    fresh_model, fresh = make()
    report = import_state(fresh, theirs.state_dict())
    assert set(report.unused) == {"tok_embeddings.weight", "norm.weight"}
    # A sum of weight 1 / (1 - 0.9) becomes one of weight 1 / (1 - 0.95).
    found = fresh.state[fresh_model.get_parameter(WQ)]["momentum_buffer"]
    grad = model.get_parameter(WQ).grad
    assert grad is not None
    assert torch.allclose(found, 2 * grad, rtol=1e-6, atol=0)  # one product
    before = everything(fresh_model, fresh)
    theirs.state[model.get_parameter("layers.0.feed_forward.w1.weight")]["momentum_buffer"][0] = (
        torch.nan
    )
    with pytest.raises(ValueError, match=r"w1\.weight\.momentum_buffer: found NaN or inf"):
        import_state(fresh, theirs.state_dict())
    assert all(map(torch.equal, everything(fresh_model, fresh), before))
