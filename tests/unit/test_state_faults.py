"""State that is lost or damaged between steps, and what users and wrappers keep beside it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as helpers

from amo_dist import AMO, AdaMuon, AMOConfig, Muon, MuonConfig, NorMuon, param_groups
from tests import runs
from tests.distributed import models
from tests.distributed.test_ballot import held, is_unchanged
from tests.runs import WQ

DAMAGES: dict[str, Callable[[Any], Any]] = {
    "gone": lambda value: None,
    "a number": lambda value: 3,
    "text": lambda value: "x",
    "another shape": lambda value: torch.zeros(3, 3, 3),
    "another dtype": lambda value: value.double(),
    "another device": lambda value: value.to("meta"),
}


def make(kind: type[Muon] = Muon, **fields: Any) -> tuple[nn.Module, Any]:
    is_master = fields.get("bfloat16_params") == "master"
    return runs.make(kind=kind, dtype=torch.bfloat16 if is_master else torch.float32, **fields)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    ("kind", "fields"),
    [(Muon, {"bfloat16_params": "master"}), (NorMuon, {}), (AdaMuon, {}), (AMO, {})],
)
def test_each_state_tensor_is_checked_before_anything_changes(
    kind: type[Muon], fields: dict[str, Any], damage: str
) -> None:
    """The table of tensors is what the optimizer has made."""
    model, optimizer = make(kind, **fields)
    runs.train(model, optimizer, 1, 2)
    models.set_gradients(model, 1, 3)
    for name, param in model.named_parameters():
        for field, value in dict(optimizer.state[param]).items():
            before = held(model, optimizer)
            damaged = DAMAGES[damage](value)
            optimizer.state[param][field] = damaged
            if damaged is None:
                del optimizer.state[param][field]
            with pytest.raises(ValueError, match=f"^state of {name}.{field}: found .*, expected "):
                optimizer.step()
            optimizer.state[param][field] = value
            assert is_unchanged(before)
    twin, other = make(kind, **fields)
    runs.train(twin, other, 1, 2)
    assert runs.equal(runs.train(model, optimizer, 3, 4), runs.train(twin, other, 3, 4))


@pytest.mark.parametrize("note", [3, "text", torch.ones(5), torch.ones(12, 8)])
@pytest.mark.parametrize("kind", [Muon, NorMuon, AdaMuon])
def test_a_wrappers_own_entries_pass_through_steps_and_loads(kind: type[Muon], note: Any) -> None:
    """As timm's Lookahead keeps its slow weights."""
    model, optimizer = make(kind)
    twin, other = make(kind)
    for param in model.parameters():
        optimizer.state[param]["lookahead_slow_buff"] = note
    runs.train(twin, other, 1, 2)
    runs.train(model, optimizer, 1, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    resumed, loaded = make(kind)
    resumed.load_state_dict(model.state_dict())
    loaded.load_state_dict(saved)
    kept = loaded.state[resumed.get_parameter(WQ)]["lookahead_slow_buff"]
    assert torch.equal(kept, note) if isinstance(note, Tensor) else kept == note
    expected = runs.train(twin, other, 3, 4)
    assert runs.equal(runs.train(model, optimizer, 3, 4), expected)
    assert runs.equal(runs.train(resumed, loaded, 3, 4), expected)


@pytest.mark.parametrize("options", [{}, {"full_state_dict": True}])
@pytest.mark.parametrize("has_keys", [True, False])
def test_momentum_that_was_moved_is_resumed_by_pytorchs_helpers(
    options: dict[str, bool], has_keys: bool
) -> None:
    """A checkpoint without the two keys has those of the settings."""
    model, optimizer = make()
    moved = {"momentum": 0.5, "nesterov": False} if has_keys else {}
    for group in optimizer.param_groups:
        group.update(moved)
    runs.train(model, optimizer, 1, 2)
    form = helpers.StateDictOptions(**options)
    state = copy.deepcopy(helpers.get_optimizer_state_dict(model, optimizer, options=form))
    if not has_keys:
        for group in state["param_groups"]:
            del group["momentum"], group["nesterov"]
    resumed, other = make()
    resumed.load_state_dict(model.state_dict())
    helpers.set_optimizer_state_dict(resumed, other, state, options=form)
    for group in other.param_groups:
        assert group["momentum"] == moved.get("momentum", 0.95)
        assert group["nesterov"] == moved.get("nesterov", True)
    assert runs.equal(runs.train(resumed, other, 3, 4), runs.train(model, optimizer, 3, 4))


def test_a_convolution_in_another_memory_format_is_named() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3, bias=False), nn.Conv2d(8, 4, 3, bias=False))
    groups = param_groups(model, patterns={r"\d\.weight": "conv"}, flatten_conv=True)
    optimizer = Muon(groups)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    model.to(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match=r"^0.weight: .*another order, .*contiguous_format"):
        optimizer.step()


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16])
def test_the_callers_autocast_changes_no_bit(cast: torch.dtype) -> None:
    (model, optimizer), twin = make(ns_dtype="float32"), make(ns_dtype="float32")
    models.set_gradients(model, 1, 1)
    with torch.autocast("cpu", dtype=cast):
        optimizer.step()
    assert runs.equal(runs.weights(model), runs.train(*twin, 1, 1))


def test_state_of_an_earlier_run_without_its_schedule_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A trainer that fills state in place must load the schedule, too."""
    model, optimizer = make(AMO)
    runs.train(model, optimizer, 1, 2)
    for is_loaded in (False, True):
        twin, other = make(AMO)
        for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
            for field, value in optimizer.state[theirs].items():
                other.state[mine][field].copy_(value)
        if is_loaded:
            other.load_control_state_dict(optimizer.control_state_dict())
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            runs.train(twin, other, 3, 3)
        said = [record.getMessage() for record in caplog.records]
        assert any("momentum of an earlier run" in line for line in said) != is_loaded


def test_other_arguments_and_settings_are_answered_with_what_takes_their_place() -> None:
    model = models.plain_model(runs.SHAPES)
    for option, answer in (("ns_steps", "schedule"), ("fused", "fused kernels"), ("lrr", "config")):
        with pytest.raises(TypeError, match=f"{option}.*{answer}"):
            Muon(model, **{option: 1})
    with pytest.raises(ValueError, match=r"^config: found 'AMOConfig', expected a MuonConfig"):
        Muon(model, config=AMOConfig())
    with pytest.raises(ValueError, match=r"^config: found a MuonConfig, expected an AMOConfig"):
        AMO(model, config=MuonConfig())
    with pytest.raises(ValueError, match=r"^params: found generator, expected the model, or "):
        Muon(model.named_parameters())
    state = AMO(model).state_dict()
    with pytest.raises(
        ValueError, match="found 'amo', expected 'fixed': resume with the optimizer"
    ):
        Muon(model).load_state_dict(state)


def test_the_model_takes_the_place_of_its_groups() -> None:
    model, twin = (models.plain_model(runs.SHAPES) for _ in range(2))
    optimizers = Muon(model, lr=0.01), Muon(param_groups(twin), lr=0.01)
    weights = [
        runs.train(own, optimizer, 1, 2)
        for own, optimizer in zip((model, twin), optimizers, strict=True)
    ]
    assert runs.equal(*weights)
