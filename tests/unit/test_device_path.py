"""The path for devices on one process: what it keeps between steps, what a bad step leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amo_dist import Muon, MuonConfig, param_groups
from amo_dist.kernels.elementwise import apply_update, update_momentum
from amo_dist.kernels.scratch import Scratch
from tests import rehearsal
from tests.distributed import models

NAME = "layers.0.attention.wq.weight"
SHAPES = {NAME: (12, 8), "layers.1.attention.wq.weight": (12, 8), "norm.weight": (8,)}


def train(
    between: Callable[[nn.Module, Muon], None] = lambda model, optimizer: None, **options: Any
) -> list[Tensor]:
    """Parameters and state after a few steps, with something done after each."""
    model = models.plain_model(SHAPES)
    with rehearsal.on_devices():
        optimizer = Muon(param_groups(model), **{"lr": 0.02, **options})
        for step in range(1, 6):
            models.set_gradients(model, 1, step)
            optimizer.step()
            between(model, optimizer)
        optimizer.check_last_update()
    state = [value for values in optimizer.state.values() for value in values.values()]
    return [tensor.detach().clone() for tensor in [*model.parameters(), *state]]


def move_parameters(model: nn.Module, optimizer: Muon) -> None:
    for param in model.parameters():
        param.data = param.data.clone()


def replace_state(model: nn.Module, optimizer: Muon) -> None:
    for values in optimizer.state.values():
        values.update({name: value.clone() for name, value in values.items()})


def load_state(model: nn.Module, optimizer: Muon) -> None:
    optimizer.load_state_dict(models.through_a_file(optimizer.state_dict()))


@pytest.mark.parametrize("between", [move_parameters, replace_state, load_state])
def test_what_came_to_lie_elsewhere_is_found(between: Callable[[nn.Module, Muon], None]) -> None:
    assert all(map(torch.equal, train(between), train()))


def test_a_rate_in_a_tensor_gives_the_bits_of_a_number() -> None:
    as_tensor = train(lr=torch.tensor(0.02, dtype=torch.float64))
    assert all(map(torch.equal, as_tensor, train()))


@pytest.mark.parametrize("how", ["foreach", "for-loop"])
def test_an_adamw_that_cannot_leave_out_a_step_waits(how: str) -> None:
    model = models.plain_model(SHAPES)
    config = MuonConfig(adamw_implementation=how, nonfinite="skip_step")
    with rehearsal.on_devices():
        optimizer = Muon(param_groups(model), config=config)
        for step in (1, 2):
            models.set_gradients(model, 1, step)
            grad = model.get_parameter(NAME).grad
            assert grad is not None
            grad[0, 0] = torch.nan
            optimizer.step()
            assert optimizer.metrics()["optimizer/steps_skipped"] == step


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


def test_scratch_gives_aligned_views_that_do_not_overlap() -> None:
    scratch = Scratch()
    like = [torch.empty(3, 5), torch.empty(0), torch.empty(64), torch.empty(1)]
    flat, views = scratch.take("a", like, torch.float32)
    for number, view in enumerate(views):
        view.fill_(number)
    assert [view.shape for view in views] == [each.shape for each in like]
    assert all(bool((view == number).all()) for number, view in enumerate(views))
    assert all(view.storage_offset() % 64 == 0 for view in views)
    assert scratch.take("a", like, torch.float32)[1] is views
    # A larger list takes the place of a smaller one.
    scratch.take("a", [torch.empty(1000)], torch.float32)
    again, _ = scratch.take("a", like, torch.float32)
    assert again.untyped_storage().nbytes() >= 4000
    assert flat.data_ptr() != again.data_ptr()
