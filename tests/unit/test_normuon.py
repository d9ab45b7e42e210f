"""NorMuon: one second moment a neuron, whatever the form in which a parameter holds matrices."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amo_dist import Fused, MuonConfig, NorMuon, param_groups
from amo_dist.optimizers.normuon import NorMuonRule

QKV = (("attn_q", 6), ("attn_k", 4), ("attn_v", 2))


def build(weight: Tensor, target: Any, **options: Any) -> tuple[nn.Parameter, NorMuon]:
    model = nn.Module()
    model.weight = nn.Parameter(weight.clone())
    groups = param_groups(model, patterns={"weight": target})
    settings = {"lr": 1.0, "weight_decay": 0.0, "config": MuonConfig(ns_dtype="float32")}
    return model.weight, NorMuon(groups, **{**settings, **options})


def train(weight: Tensor, target: Any, steps: int = 3) -> tuple[Tensor, Tensor]:
    """The final parameter and its second moments."""
    param, optimizer = build(weight, target)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        param.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()
    return param.detach(), optimizer.state[param]["neuron_moment"]


def test_every_row_of_a_first_update_has_the_same_size_and_the_whole_the_stated_norm() -> None:
    param, optimizer = build(torch.zeros(12, 8), "attn_q")
    # Rows of very unequal size: so are those of an approximate polar factor.
    param.grad = torch.randn(12, 8) * torch.logspace(0, -3, 12).unsqueeze(1)
    optimizer.step()
    rows = param.detach().norm(dim=1)
    # v = (1 - beta2) mean(O^2) after one step, so that O / sqrt(v) has one size for all rows; 1e-8
    # is added to roots of about 1e-3 at least.
    torch.testing.assert_close(rows, rows.mean().expand(12), rtol=1e-4, atol=0)
    torch.testing.assert_close(param.detach().norm(), torch.tensor(0.2 * (12 * 8) ** 0.5))


@pytest.mark.parametrize("groups", [1, 2])
def test_fused_rows_train_as_matrices_of_their_own(groups: int) -> None:
    generator = torch.Generator().manual_seed(9)
    weight = torch.randn(12, 8, generator=generator)
    fused, moments = train(weight, Fused(QKV, groups=groups))
    assert moments.shape == (12, 1)
    rows = [size // groups for _, size in QKV]
    parts = list(torch.arange(12).view(groups, -1).split(rows, dim=1))
    for part in parts:
        index = part.flatten()
        model = nn.Module()
        model.weight = nn.Parameter(weight[index])
        alone = NorMuon(
            param_groups(model, patterns={"weight": "attn_q"}),
            lr=1.0,
            weight_decay=0.0,
            config=MuonConfig(ns_dtype="float32"),
        )
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            model.weight.grad = torch.randn(12, 8, generator=generator)[index]
            alone.step()
        assert torch.equal(fused[index], model.weight.detach())
        assert torch.equal(moments[index], alone.state[model.weight]["neuron_moment"])


def test_fused_columns_count_neurons_by_columns() -> None:
    weight = torch.randn(8, 12, generator=torch.Generator().manual_seed(9))
    _, moments = train(weight, Fused(QKV, dim=1))
    assert moments.shape == (1, 12)
    assert (moments > 0).all()


@pytest.mark.parametrize("beta2", [-0.1, 1.0, float("nan")])
def test_a_bad_decay_is_named(beta2: float) -> None:
    with pytest.raises(ValueError, match=r"beta2: found .*, expected a number in \[0, 1\)"):
        build(torch.zeros(4, 6), "attn_q", beta2=beta2)


def test_a_decay_that_goes_bad_later_stops_the_step() -> None:
    param, optimizer = build(torch.zeros(4, 6), "attn_q")
    param.grad = torch.ones_like(param)
    for bad in (1.0, "0.9"):
        optimizer.param_groups[0]["beta2"] = bad
        with pytest.raises(ValueError, match=r"groups\[0\].beta2: found .*, expected a number"):
            optimizer.step()
    assert not param.any()


def test_a_group_may_have_its_own_decay() -> None:
    _, optimizer = build(torch.zeros(4, 6), "attn_q", beta2=0.9)
    assert optimizer.param_groups[0]["beta2"] == 0.9
    assert optimizer.state_dict()["param_groups"][0]["beta2"] == 0.9


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
