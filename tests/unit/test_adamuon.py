from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from amo_dist import param_groups
from amo_dist.optimizers.adamuon import AdaMuon, fraction_bits, sum_of_squares

SHAPES = {"wq": (12, 8), "wk": (3, 8), "wv": (1, 8), "wo": (8, 12)}


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    root = nn.Module()
    layer = nn.Module()
    root.layers = nn.ModuleList([layer])
    layer.attention = nn.Module()
    for name, shape in SHAPES.items():
        module = nn.Module()
        module.weight = nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        layer.attention.add_module(name, module)
    return root


def give_gradients(root: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for param in root.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def build(root: nn.Module, **kwargs: Any) -> AdaMuon:
    return AdaMuon(param_groups(root), **{"lr": 1.0, "weight_decay": 0.0, **kwargs})


def weights(root: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in root.named_parameters()}


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


def test_an_update_has_the_stated_frobenius_norm() -> None:
    root = model()
    optimizer = build(root)
    for step in range(1, 4):
        before = weights(root)
        give_gradients(root, step)
        optimizer.step()
        for name, param in root.named_parameters():
            # float32: the factor, the product and the difference are each rounded once.
            norm = (param - before[name]).double().norm().item()
            assert norm == pytest.approx(0.2 * math.sqrt(param.numel()), rel=1e-5), name


def test_only_signs_count_in_the_first_step() -> None:
    one, other = model(), model()
    optimizers = [build(one), build(other)]
    give_gradients(one, 1)
    for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
        generator = torch.Generator().manual_seed(5)
        theirs.grad = ours.grad * torch.rand(ours.shape, generator=generator).clamp(min=0.1)
    for optimizer in optimizers:
        optimizer.step()
    for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_zero_gradient_moves_nothing() -> None:
    root = model()
    optimizer = build(root)
    before = weights(root)
    for param in root.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert all(torch.equal(param, before[name]) for name, param in root.named_parameters())


def test_a_missing_gradient_leaves_parameter_and_state() -> None:
    root = model()
    optimizer = build(root)
    give_gradients(root, 1)
    skipped = root.get_parameter("layers.0.attention.wk.weight")
    skipped.grad = None
    before = weights(root)
    optimizer.step()
    for name, param in root.named_parameters():
        is_skipped = param is skipped
        assert torch.equal(param, before[name]) == is_skipped
        assert (optimizer.state[param]["second_moment"] == 0).all().item() == is_skipped
