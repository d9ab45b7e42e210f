"""PyTorch's own database of optimizers, asked of this family: ``pytest tests/torch_contract.py``.

The wheel of PyTorch ships the hyperparameters, mistakes and schedulers with which its test suite
tries every optimizer (``torch.testing._internal.common_optimizers``), but not the suite. The cases
here ask what that suite asks, with those inputs. The classes take parameters by name from
`param_groups`; `build` names the tensors that PyTorch's inputs come with.

It runs as a process of its own, since importing PyTorch's test helpers freezes the flags of
``torch.backends`` for the whole process. It needs the package ``expecttest``, as they do.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal import common_optimizers as outside

from amo_dist import AMO, ROOT, AdaMuon, AMOConfig, Muon, MuonConfig, NorMuon, param_groups
from amo_dist.schedule.types import Schedule
from tests.distributed import models

CPU = torch.device("cpu")
SHORT = AMOConfig(observe_until=4, observe_every=2, sample_size=2, transition_steps=3)
INFO = {info.optim_cls.__name__: info for info in outside.optim_db}
EVERY_INPUT = pytest.mark.parametrize(
    "kwargs",
    [
        pytest.param(entry.kwargs, id=f"{name}, {entry.desc}")
        for name in ("Muon", "AdamW")
        for entry in INFO[name].optim_inputs_func(CPU)
    ],
)
"""Hyperparameters of the two optimizers whose work each class does."""
pytestmark = [
    pytest.mark.parametrize("cls", [AMO, Muon, AdaMuon, NorMuon, ROOT]),
    pytest.mark.filterwarnings("ignore"),  # a first step without gradients warns
]
NOT_OFFERED = {
    "maximize": "no option: negate the loss",
    "amsgrad": "no option of our AdamW",
    "foreach": "no option: lists of tensors are always updated at once",
}
"""Options of PyTorch's optimizers that these classes lack."""
SETTINGS = {"momentum": "momentum", "adjust_lr_fn": "adjust_lr"}
"""Options of PyTorch's Muon that are settings here."""


def build(cls: type[Muon], params: Iterable[Any], **kwargs: Any) -> Muon:
    """An optimizer of plain tensors: matrices as one operator type, the rest to AdamW."""
    options: dict[str, Any] = {}
    fields: dict[str, Any] = {}
    for name, value in copy.deepcopy(kwargs).items():  # schedulers change a tensor in place
        if name in NOT_OFFERED:
            pytest.skip(f"{name}: {NOT_OFFERED[name]}")
        if name in SETTINGS:
            fields[SETTINGS[name]] = value
        elif name not in ("ns_steps", "ns_coefficients"):
            options[name] = value
    options["config"] = dataclasses.replace(SHORT if cls is AMO else MuonConfig(), **fields)
    if "ns_steps" in kwargs or "ns_coefficients" in kwargs:
        if cls in (AMO, ROOT):
            pytest.skip("ns_steps, ns_coefficients: AMO and ROOT choose coefficients themselves")
        triple = kwargs.get("ns_coefficients", (3.4445, -4.775, 2.0315))
        options["schedule"] = Schedule((triple,) * kwargs.get("ns_steps", 5))
    model = models.build({f"p{index}": param for index, param in enumerate(params)})
    matrices = [name for name, param in model.named_parameters() if param.dim() == 2]
    return cls(param_groups(model, patterns=dict.fromkeys(matrices, "matrix")), **options)


def problem() -> tuple[list[nn.Parameter], Callable[[], Tensor]]:
    """Parameters of a linear layer and one without elements; a loss that makes gradients."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for shape in ((10, 5), (10,), (5, 0))]
    inputs = torch.randn(5)

    def loss() -> Tensor:
        for param in params:
            param.grad = torch.zeros_like(param)
        value = (params[0].mv(inputs) + params[1]).square().sum()
        value.backward()
        return value.detach()

    return params, loss


@EVERY_INPUT
def test_the_loss_falls_and_a_loaded_state_goes_on_alike(
    cls: type[Muon], kwargs: dict[str, Any]
) -> None:
    params, loss = problem()
    before = float(loss())
    optimizer = build(cls, params, **kwargs)
    repr(optimizer)
    for _ in range(8):
        optimizer.step(loss)
    twins, twin_loss = problem()
    for twin, param in zip(twins, params, strict=True):
        twin.data = param.data.clone()
    other = build(cls, twins, **kwargs)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(22):
        assert float(optimizer.step(loss)) == float(other.step(twin_loss))
    assert float(loss()) < before
    assert all(map(torch.equal, params, twins))
    assert repr(optimizer.state_dict()) == repr(other.state_dict())


MISTAKES = {
    mistake.optimizer_error_input.desc: mistake.optimizer_error_input
    for name in ("AdamW", "Muon")
    for mistake in INFO[name].optim_error_inputs_func(CPU, torch.float32)
}
"""Of both entries; those of options that are not offered are skipped."""


@pytest.mark.parametrize("entry", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_refused(cls: type[Muon], entry: Any) -> None:
    """A mistake of PyTorch's database is an error at construction, in words of our own."""
    if entry.desc == "only support 2D parameters":
        pytest.skip("params: a tensor of three dims is a stack of matrices")
    if entry.desc == "betas must be either both floats or both Tensors":
        pytest.skip("betas: a float and a tensor may stand together")

    def make() -> Muon:
        if entry.params is None or "adjust_lr_fn" in entry.kwargs:
            return build(cls, problem()[0], **entry.kwargs)
        if isinstance(entry.params, list) and all(isinstance(p, Tensor) for p in entry.params):
            named = [(f"p{index}", param) for index, param in enumerate(entry.params)]
            return cls([{"params": named, "algorithm": "adamw"}])
        return cls(entry.params)

    with pytest.raises(ValueError, match=": found "):
        make()
