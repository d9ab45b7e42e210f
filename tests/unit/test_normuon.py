"""NorMuon: one second moment a neuron, whatever the form in which a parameter holds matrices."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from amo_dist import Fused, MuonConfig, NorMuon, param_groups
from amo_dist.kernels.elementwise import update_scale
from amo_dist.schedule.types import Schedule
from tests.distributed import models

QKV = (("attn_q", 6), ("attn_k", 4), ("attn_v", 2))


GRADIENTS = [models.gradient(0, step, "", (12, 8)) for step in range(3)]


def train(
    weight: Tensor, target: Any, gradients: list[Tensor], **options: Any
) -> tuple[Tensor, Tensor]:
    """The final parameter and its second moments."""
    model = models.build({"weight": weight.clone()})
    groups = param_groups(model, patterns={"weight": target})
    options = {"config": MuonConfig(ns_dtype="float32"), **options}
    optimizer = NorMuon(groups, 1.0, 0.0, **options)
    (param,) = model.parameters()
    for gradient in gradients:
        param.grad = gradient
        optimizer.step()
    return param.detach(), optimizer.state[param]["neuron_moment"]


def test_fused_rows_train_as_matrices_of_their_own() -> None:
    weight = models.initial("", (12, 8))
    fused, moments = train(weight, Fused(QKV, groups=2), GRADIENTS)
    assert moments.shape == (12, 1)
    for part in torch.arange(12).view(2, -1).split([3, 2, 1], dim=1):
        index = part.flatten()
        alone, own = train(weight[index], "attn_q", [grad[index] for grad in GRADIENTS])
        assert torch.equal(fused[index], alone)
        assert torch.equal(moments[index], own)


@pytest.mark.parametrize("shape", [(12, 8), (8, 12)])
@pytest.mark.parametrize("adjust_lr", ["match_rms_adamw", "original", "spectral"])
def test_an_update_has_the_norm_of_muons(adjust_lr: str, shape: tuple[int, int]) -> None:
    config = MuonConfig(ns_dtype="float32", adjust_lr=adjust_lr)
    gradient = models.gradient(0, 0, "", shape)
    found, _ = train(torch.zeros(shape), "attn_q", [gradient], config=config)
    wanted = update_scale(shape, config.update_factor, adjust_lr) * math.sqrt(8)
    # Entries, and the rate and scale that multiply them, are rounded to float32, once or twice.
    assert found.double().norm().item() == pytest.approx(wanted, rel=1e-6)


def test_entries_beyond_those_of_orthogonal_matrices_do_not_overflow_the_sums() -> None:
    """Sums of squares are int64: of entries of 10 their total was negative, and the factor NaN."""
    tenfold = Schedule(((640.0, 0.0, 0.0),), norm_scale=1.0)
    found, _ = train(torch.zeros(64, 64), "attn_q", [torch.ones(64, 64)], schedule=tenfold)
    # A sum of 4,096 equal squares in float32 is off by a few roundings.
    assert found.double().norm().item() == pytest.approx(0.2 * 64, rel=1e-6)
