"""Names in a state dict decide which parameter gets which state."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from amo_dist import Muon, param_groups
from tests import runs
from tests.distributed import models

A, B = "layers.0.attention.wq.weight", "layers.1.attention.wq.weight"


def trained(names: list[str]) -> tuple[nn.Module, Muon]:
    model, optimizer = runs.make(kind=Muon, shapes=dict.fromkeys(names, (6, 4)))
    runs.train(model, optimizer, 1, 1)
    return model, optimizer


def momenta(model: nn.Module, optimizer: Muon) -> dict[str, Tensor]:
    params = model.named_parameters()
    return {name: optimizer.state[param]["momentum_buffer"] for name, param in params}


def test_two_matrices_of_one_shape_keep_their_momenta() -> None:
    saved = trained([A, B])
    expected = momenta(*saved)
    assert not torch.equal(expected[A], expected[B])
    model = models.plain_model({A: (6, 4), B: (6, 4)})
    groups = param_groups(model)
    groups[0]["params"].reverse()
    optimizer = Muon(groups)
    optimizer.load_state_dict(saved[1].state_dict())
    for name, value in momenta(model, optimizer).items():
        assert torch.equal(value, expected[name])


def test_state_of_other_names_is_refused() -> None:
    _, saved = trained([A, B])
    _, optimizer = trained([A, "layers.2.attention.wq.weight"])
    message = rf"^param_names\[0\]: found .*{B}, layers\.2\.attention\.wq\.weight"
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved.state_dict())


def test_state_without_names_goes_by_position() -> None:
    model, saved = trained([A, B])
    state = saved.state_dict()
    del state["param_names"]
    other, optimizer = trained([A, B])
    for value in momenta(other, optimizer).values():
        value.zero_()
    optimizer.load_state_dict(state)
    expected = momenta(model, saved)
    assert all(torch.equal(v, expected[name]) for name, v in momenta(other, optimizer).items())
