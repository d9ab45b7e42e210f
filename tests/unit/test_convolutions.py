"""Convolutions as matrices; `tests/distributed/test_layouts_more.py` shards them."""

from __future__ import annotations

import pytest
import torch

from amo_dist import Muon, MuonConfig, param_groups
from tests.distributed.models import build, gradient, initial


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
