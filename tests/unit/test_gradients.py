"""The bounds on gradients: nothing below them overflows, and little above them would not."""

from __future__ import annotations

import pytest
import torch

from amo_dist.engine.ballot import momentum_bound, second_moment_bound
from amo_dist.kernels.elementwise import nesterov, update_momentum


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.95, 0.999])
def test_momentum_never_overflows_below_its_bound(momentum: float) -> None:
    grad = torch.full((2,), momentum_bound(momentum))
    buffer = torch.zeros(2)
    for _ in range(20_000 if momentum > 0.99 else 500):  # until the sum stands still
        update_momentum([buffer], [grad], momentum)
    assert buffer.isfinite().all()
    ahead = torch.empty(2)
    nesterov([buffer], [grad], momentum, [ahead])
    assert ahead.isfinite().all()
    # Four times the bound overflows: it is not a guess.
    buffer.zero_()
    for _ in range(20_000 if momentum > 0.99 else 500):
        update_momentum([buffer], [4 * grad], momentum)
    nesterov([buffer], [4 * grad], momentum, [ahead])
    assert not ahead.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_second_moment_holds_the_square_of_its_bound(dtype: torch.dtype) -> None:
    bound = torch.tensor(second_moment_bound(dtype), dtype=dtype)
    assert bound.square().isfinite()
    assert not (4 * bound).square().isfinite()
