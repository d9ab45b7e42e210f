"""Convolutions as matrices; `tests/distributed/test_layouts_more.py` shards them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Shard

from amo_dist import AMO, AMOConfig, Muon, MuonConfig, NorMuon, param_groups
from amo_dist.distributed.layout import make_matrix, mesh_layout
from tests.distributed.models import build, gradient, initial

SHAPES = {
    "layers.0.conv.weight": (8, 4, 3, 2),
    "layers.0.depthwise.weight": (8, 1, 3, 3),
    "layers.0.fc1.weight": (6, 5),
    "stem.weight": (3, 2, 3, 3),
}
CONFIG = AMOConfig(observe_until=4, observe_every=2, transition_steps=2)


def trained(optimizer_class: type[Muon], *, flat: bool) -> dict[str, Tensor]:
    tensors = {name: initial(name, shape) for name, shape in SHAPES.items()}
    if flat:
        tensors = {name: tensor.flatten(1) for name, tensor in tensors.items()}
    model = build(tensors)
    patterns = {r".*\.conv\.weight": "conv", r".*depthwise.*": "adamw"} if flat else {}
    groups = param_groups(model, patterns=patterns, flatten_conv=True)
    fields = {"config": CONFIG} if optimizer_class is AMO else {}
    optimizer = optimizer_class(groups, lr=1e-2, **fields)
    for step in range(7):
        for name, param in model.named_parameters():
            matrix = gradient(0, step, name, tuple(param.flatten(1).shape))
            param.grad = matrix.view(param.shape)
        optimizer.step()
    return {name: param.detach().flatten(1) for name, param in model.named_parameters()}


@pytest.mark.parametrize("optimizer_class", [AMO, NorMuon])
def test_a_convolution_trains_as_the_matrix_that_it_is(optimizer_class: type[Muon]) -> None:
    found, expected = (trained(optimizer_class, flat=flat) for flat in (False, True))
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
        assert not torch.equal(tensor, initial(name, SHAPES[name]).flatten(1))


@pytest.mark.parametrize("how", ["nearest", "master"])
def test_a_convolution_of_bfloat16_is_rounded_as_the_matrix_that_it_is(how: str) -> None:
    shape, params = (8, 4, 3, 2), []
    for flat in (False, True):
        tensor = initial("layers.0.conv.weight", shape).bfloat16()
        model = build({"layers.0.conv.weight": tensor.flatten(1) if flat else tensor})
        groups = param_groups(model, patterns={r".*": "conv"}, flatten_conv=True)
        optimizer = Muon(groups, lr=1e-2, config=MuonConfig(bfloat16_params=how))
        for step in range(4):
            for param in model.parameters():
                param.grad = gradient(0, step, "", (8, 24)).view(param.shape).bfloat16()
            optimizer.step()
        params.append(next(model.parameters()).detach().flatten(1))
    assert torch.equal(*params)


def test_memory_in_another_order_is_an_error() -> None:
    model = build({name: initial(name, shape) for name, shape in SHAPES.items()})
    groups = param_groups(model.to(memory_format=torch.channels_last), flatten_conv=True)
    with pytest.raises(ValueError, match=r"layers.0.conv.weight: .* memory has another order"):
        Muon(groups)


def test_shards_along_the_last_dims_are_an_error() -> None:
    layout = mesh_layout((8, 4, 3, 2), torch.arange(3), [Shard(2)])
    with pytest.raises(ValueError, match="expected no shards but along the first two"):
        make_matrix("conv", layout, 0)
