"""NorMuon: one second moment a neuron, whatever the form in which a parameter holds matrices."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from amo_dist import Fused, MuonConfig, NorMuon, param_groups
from amo_dist.kernels.elementwise import update_scale
from amo_dist.kernels.exact_sums import fraction_bits, sum_of_squares
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


@given(
    st.lists(st.floats(-4.375, 4.375, width=32), min_size=1, max_size=40),
    st.lists(st.integers(0, 40), max_size=4),
)
def test_the_sum_of_squares_is_the_same_however_it_is_cut(
    values: list[float], cuts: list[int]
) -> None:
    whole = torch.tensor(values, dtype=torch.float32)
    bits = fraction_bits(len(values), 0.95)
    edges = [0, *sorted(min(cut, len(values)) for cut in cuts), len(values)]
    parts = [whole[a:b] for a, b in itertools.pairwise(edges)]
    total = sum_of_squares(whole, bits)
    assert total == sum(sum_of_squares(part, bits) for part in parts)
    # Each square is rounded by half a unit of 2^-bits at most.
    exact = sum(Fraction(value) ** 2 for value in whole.double().tolist())
    assert abs(int(total) - exact * 2**bits) <= len(values) / 2


@pytest.mark.parametrize("num_elements", [1, 7, 2**24, 10**10])
@pytest.mark.parametrize("decay", [0.0, 0.95, 0.999])
def test_no_sum_overflows(num_elements: int, decay: float) -> None:
    largest = 1 / (1 - decay)
    total = num_elements * largest * 2.0 ** fraction_bits(num_elements, decay)
    assert 2**59 <= total < 2**62
