"""Kernels under the mask of a step that may have to change nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from amo_dist.kernels.elementwise import apply_update, update_momentum

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gradient_dtype", DTYPES)
@pytest.mark.parametrize("number", [torch.nan, torch.inf, 0.0, -0.0, 1.0])
def test_a_set_mask_changes_no_bit(
    dtype: torch.dtype, gradient_dtype: torch.dtype, number: float
) -> None:
    before = torch.tensor([0.0, -0.0, 1.5, -2e-30, torch.nan, torch.inf]).to(dtype)
    incoming, bad = torch.full((6,), number, dtype=gradient_dtype), torch.tensor(True)
    momentum, param = before.clone(), before.clone()
    update_momentum([momentum], [incoming], 0.9, bad=bad)
    apply_update([param], [incoming], lr=0.1, weight_decay=0.1, scale=0.2, bad=bad)
    for after in (momentum, param):
        assert torch.equal(after.view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_unset_mask_gives_the_bits_of_none(dtype: torch.dtype) -> None:
    values, results = [torch.randn(7, 5).to(dtype) for _ in range(4)], []
    for bad in (None, torch.tensor(False)):
        first, second, *others = (value.clone() for value in values)
        update_momentum([first, second], others, 0.9, bad=bad)
        options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1, "scale": [0.2, 0.3]}
        apply_update([first, second], others, **options, bad=bad)
        results.append((first, second))
    assert all(map(torch.equal, *results))
