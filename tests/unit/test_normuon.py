"""NorMuon: one second moment a neuron, whatever the form in which a parameter holds matrices."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from amo_dist import Fused, MuonConfig, NorMuon, param_groups
from amo_dist.optimizers.normuon import NorMuonRule
from tests.distributed import models

QKV = (("attn_q", 6), ("attn_k", 4), ("attn_v", 2))


GRADIENTS = [models.gradient(0, step, "", (12, 8)) for step in range(3)]


def train(weight: Tensor, target: Any, gradients: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The final parameter and its second moments."""
    model = models.build({"weight": weight.clone()})
    groups = param_groups(model, patterns={"weight": target})
    optimizer = NorMuon(groups, 1.0, 0.0, config=MuonConfig(ns_dtype="float32"))
    (param,) = model.parameters()
    for gradient in gradients:
        param.grad = gradient
        optimizer.step()
    return param.detach(), optimizer.state[param]["neuron_moment"]


@pytest.mark.parametrize("groups", [1, 2])
def test_fused_rows_train_as_matrices_of_their_own(groups: int) -> None:
    weight = models.initial("", (12, 8))
    fused, moments = train(weight, Fused(QKV, groups=groups), GRADIENTS)
    assert moments.shape == (12, 1)
    rows = [size // groups for _, size in QKV]
    for part in torch.arange(12).view(groups, -1).split(rows, dim=1):
        index = part.flatten()
        alone, own = train(weight[index], "attn_q", [grad[index] for grad in GRADIENTS])
        assert torch.equal(fused[index], alone)
        assert torch.equal(moments[index], own)


def test_fused_columns_count_neurons_by_columns() -> None:
    transposed = [grad.T.contiguous() for grad in GRADIENTS]
    _, moments = train(models.initial("", (8, 12)), Fused(QKV, dim=1), transposed)
    assert moments.shape == (1, 12)
    assert (moments > 0).all()


def test_entries_beyond_those_of_orthogonal_matrices_do_not_overflow_the_sums() -> None:
    """Sums of squares are int64: of entries of 10 their total was negative, and the factor NaN."""
    piece: Any = SimpleNamespace(
        group={"beta2": 0.95},
        dim=0,
        matrix=SimpleNamespace(shape=(64, 64), dim=0, num_elements=64 * 64, regions_by_rank={}),
        state={"neuron_moment": torch.zeros(64, 1)},
        box=((0, 64), (0, 64)),
    )
    totals: list[Tensor] = []

    def allsum(shares: Sequence[Tensor | None]) -> list[Tensor]:
        totals.extend(share for share in shares if share is not None)
        return totals

    (update,) = NorMuonRule(MuonConfig()).post([torch.full((64, 64), 10.0)], [piece], allsum)
    (total,) = totals
    assert total > 0
    # A sum of 4,096 equal squares in float32 is off by a few roundings.
    norm = update.double().norm()
    assert norm.item() == pytest.approx(0.2 * 64, rel=1e-6)
