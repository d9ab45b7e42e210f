"""The path for devices on one process: what it keeps between steps, what a bad step leaves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amo_dist import Muon, param_groups
from amo_dist.kernels.elementwise import apply_update, update_momentum
from tests.distributed import models
from tests.simulated_device import simulated_device

SHAPES = {
    "layers.0.attention.wq.weight": (12, 8),
    "layers.1.attention.wq.weight": (12, 8),
    "norm.weight": (8,),
}


def train(
    between: Callable[[nn.Module, Muon], None] = lambda model, optimizer: None, **options: Any
) -> list[Tensor]:
    """Parameters and state after a few steps, with something done after each."""
    with simulated_device():
        model = models.plain_model(SHAPES, "cuda")
        optimizer = Muon(param_groups(model), **{"lr": 0.02, **options})
        for step in range(1, 6):
            models.set_gradients(model, 1, step)
            optimizer.step()
            between(model, optimizer)
        optimizer.check_last_update()
        state = [value for values in optimizer.state.values() for value in values.values()]
        return [tensor.detach().cpu() for tensor in [*model.parameters(), *state]]


def move_parameters(model: nn.Module, optimizer: Muon) -> None:
    for param in model.parameters():
        param.data = param.data.clone()


def replace_state(model: nn.Module, optimizer: Muon) -> None:
    for values in optimizer.state.values():
        values.update({name: value.clone() for name, value in values.items()})


def load_state(model: nn.Module, optimizer: Muon) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@pytest.mark.parametrize("between", [move_parameters, replace_state, load_state])
def test_what_came_to_lie_elsewhere_is_found(between: Callable[[nn.Module, Muon], None]) -> None:
    assert all(map(torch.equal, train(between), train()))


def test_a_rate_in_a_tensor_gives_the_bits_of_a_number() -> None:
    as_tensor = train(lr=torch.tensor(0.02, dtype=torch.float64))
    assert all(map(torch.equal, as_tensor, train()))


DTYPES = [torch.float64, torch.float32, torch.bfloat16]
BAD = [torch.nan, torch.inf, 0.0, -0.0, 1.0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("came", DTYPES)
@pytest.mark.parametrize("number", BAD)
def test_what_is_bad_changes_no_bit(dtype: torch.dtype, came: torch.dtype, number: float) -> None:
    before = torch.tensor([0.0, -0.0, 1.5, -2e-30, torch.nan, torch.inf]).to(dtype)
    incoming, bad = torch.full((6,), number, dtype=came), torch.tensor(True)
    momentum, param = before.clone(), before.clone()
    update_momentum([momentum], [incoming], 0.9, bad=bad)
    apply_update([param], [incoming], lr=0.1, weight_decay=0.1, scale=0.2, bad=bad)
    for after in (momentum, param):
        assert torch.equal(after.view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_good_has_the_same_bits(dtype: torch.dtype) -> None:
    values, good = [torch.randn(7, 5).to(dtype) for _ in range(4)], torch.tensor(False)
    found = []
    for bad in (None, good):
        first, second, *others = (value.clone() for value in values)
        update_momentum([first, second], others, 0.9, bad=bad)
        options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1, "scale": [0.2, 0.3]}
        apply_update([first, second], others, **options, bad=bad)
        found.append((first, second))
    assert all(map(torch.equal, *found))
