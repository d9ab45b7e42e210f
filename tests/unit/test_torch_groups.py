"""What PyTorch's own tests ask of groups, rates and loads, asked of this family."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import SWALR

from amo_dist import AMO, Muon, NorMuon, param_groups
from tests import runs
from tests.distributed import models

# ---------------------------------------------------------------- loads of other forms


def with_names(optimizer: Muon, state: dict[str, Any]) -> None:
    """As PyTorch's optimizers write it that were given named parameters."""
    names = iter(optimizer.params_by_name)
    for group in state["param_groups"]:
        group["param_names"] = [next(names) for _ in group["params"]]


def without(*keys: str) -> Callable[[Muon, dict[str, Any]], None]:
    def drop(optimizer: Muon, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            for key in keys:
                del group[key]

    return drop


def with_whole_steps(optimizer: Muon, state: dict[str, Any]) -> None:
    for own in state["state"].values():
        if "step" in own:
            own["step"] = own["step"].item()


@pytest.mark.parametrize(
    "change", [with_names, without("lr_multiplier", "eps"), without("lr"), with_whole_steps]
)
@pytest.mark.parametrize("kind", [AMO, NorMuon])
def test_a_state_of_another_form_goes_on_alike(
    kind: type[Muon], change: Callable[[Muon, dict[str, Any]], None]
) -> None:
    model, optimizer = runs.make(kind=kind)
    runs.train(model, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    change(optimizer, state)
    found = []
    for names_before in (False, True):
        twin, other = runs.make(kind=kind)
        twin.load_state_dict(model.state_dict())
        if names_before:
            for group in other.param_groups:
                group["param_names"] = ["another"] * len(group["params"])
        other.load_state_dict(state)
        runs.train(twin, other, 4, 6)
        other.load_state_dict(other.state_dict())
        found.append((twin, other))
    runs.train(model, optimizer, 4, 6)
    for (twin, other), is_named in zip(found, (change is with_names, True), strict=True):
        assert runs.same(model, twin)
        assert all(("param_names" in group) == is_named for group in other.param_groups)


def test_a_flattened_state_is_refused_with_what_to_do() -> None:
    model, optimizer = runs.make(kind=Muon)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    message = (
        r"^state\..*: found 'a flattened key', expected state and param_groups: .*"
        "flatten_optimizer_state_dict, but not together with full_state_dict"
    )
    # What PyTorch makes of a full one on the way from rank 0 has groups beside.
    for found in (state, {**state, "param_groups": optimizer.state_dict()["param_groups"]}):
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(found)


# ---------------------------------------------------------------- groups


def test_strides_of_parameters_change_no_bit() -> None:
    found = []
    for is_strided in (False, True):
        model, optimizer = runs.make(kind=Muon)
        if is_strided:
            for param in model.parameters():
                param.data = param.data.mT.contiguous().mT if param.dim() == 2 else param.data
        runs.train(model, optimizer, 1, 6)
        found.append(model)
    assert not found[1].get_parameter(runs.WQ).is_contiguous()
    assert runs.same(*found)


# ---------------------------------------------------------------- schedulers

SCHEDULES: dict[str, Callable[[Muon], Any]] = {
    "lambda": lambda own: schedules.LambdaLR(own, lambda step: 0.9**step),
    "multiplicative": lambda own: schedules.MultiplicativeLR(own, lambda _: 0.9),
    "step": lambda own: schedules.StepLR(own, 2),
    "multi-step": lambda own: schedules.MultiStepLR(own, [2, 4]),
    "constant": lambda own: schedules.ConstantLR(own, total_iters=3),
    "linear": lambda own: schedules.LinearLR(own),
    "exponential": lambda own: schedules.ExponentialLR(own, 0.9),
    "polynomial": lambda own: schedules.PolynomialLR(own, 5),
    "cosine": lambda own: schedules.CosineAnnealingLR(own, 5),
    "warm restarts": lambda own: schedules.CosineAnnealingWarmRestarts(own, 3),
    "cyclic": lambda own: schedules.CyclicLR(own, 1e-3, 1e-2, 2),
    "one cycle": lambda own: schedules.OneCycleLR(own, 1e-2, total_steps=20),
    "plateau": lambda own: schedules.ReduceLROnPlateau(own, patience=0),
    "chained": lambda own: schedules.ChainedScheduler(
        [schedules.ConstantLR(own), schedules.ExponentialLR(own, 0.9)]
    ),
    "sequential": lambda own: schedules.SequentialLR(
        own, [schedules.ConstantLR(own, 0.1, 2), schedules.ExponentialLR(own, 0.9)], [3]
    ),
    "swa": lambda own: SWALR(own, 1e-3),
}


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_schedulers_move_the_rate_and_resume(kind: str, as_tensor: bool) -> None:
    def build(model: nn.Module) -> tuple[nn.Module, Muon, Any]:
        lr = torch.tensor(1e-2) if as_tensor else 1e-2
        optimizer = Muon(param_groups(model), lr=lr)
        return model, optimizer, SCHEDULES[kind](optimizer)

    def run(
        model: nn.Module, optimizer: Muon, scheduler: Any, first: int, last: int
    ) -> tuple[set[float], set[float]]:
        rates, momenta = set(), set()
        for step in range(first, last + 1):
            rates.add(float(optimizer.param_groups[0]["lr"]))
            momenta.add(optimizer.param_groups[0].get("momentum"))
            runs.train(model, optimizer, step, step)
            scheduler.step(*([1.0] if kind == "plateau" else []))
        return rates, momenta

    model, optimizer, scheduler = build(models.plain_model(runs.SHAPES))
    rates, momenta = run(model, optimizer, scheduler, 1, 5)
    assert len(rates) > 1
    assert (len(momenta) > 1) == (kind in ("cyclic", "one cycle"))
    assert optimizer.param_groups[1]["betas"] == (0.9, 0.95)
    twin, other, again = build(copy.deepcopy(model))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    again.load_state_dict(copy.deepcopy(scheduler.state_dict()))
    run(model, optimizer, scheduler, 6, 9)
    run(twin, other, again, 6, 9)
    assert runs.same(model, twin)
    assert isinstance(other.param_groups[0]["lr"], torch.Tensor) == as_tensor
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
