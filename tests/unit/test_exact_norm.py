"""The exact norm: every update at the size of an exact polar factor."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from amo_dist import Muon, MuonConfig, param_groups
from amo_dist.kernels.newton_schulz import scale_to_exact_norm


def updates(count: int, m: int, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, m, n, generator=torch.Generator().manual_seed(m)).to(dtype)


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (1, 7), (64, 192)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_those_of_polar_factors(shape: tuple[int, int], dtype: torch.dtype) -> None:
    found = updates(3, *shape, dtype)
    scale_to_exact_norm(found)
    # Entries are rounded once, and a sum of 12,288 squares in float32 is off by a few roundings.
    tolerance = max(torch.finfo(dtype).eps, 1e-6)
    for matrix in found.double():
        norm = torch.linalg.vector_norm(matrix).item()
        assert norm == pytest.approx(math.sqrt(min(shape)), rel=tolerance)


def test_the_factor_is_at_most_two() -> None:
    """Without a bound an update of rank one would grow by ``sqrt(min(m, n))``, here 16 times."""
    column, row = updates(1, 256, 1)[0], updates(1, 1, 320)[0]
    rank_one = (column / column.norm()) @ (row / row.norm())
    batch = torch.stack([rank_one, 20 * rank_one, 0 * rank_one])
    norms = scale_to_exact_norm(batch)
    torch.testing.assert_close(norms, torch.tensor([1.0, 20.0, 0.0]))
    # 16 is the exact norm; a norm of 20 is above half of it, and scaled in full.
    expected = torch.tensor([2.0, 16.0, 0.0])
    torch.testing.assert_close(torch.linalg.matrix_norm(batch, 2), expected)


def test_the_update_of_one_token_stays_bounded_and_is_counted() -> None:
    """Its gradient has rank one, as that of a rarely routed expert or of the first steps."""
    spectral = {}
    for norm in ("as_is", "exact"):
        model = nn.Linear(128, 128, bias=False)
        before = model.weight.detach().clone()
        config = MuonConfig(update_norm=norm)
        groups = param_groups(model, patterns={"weight": "mlp_up"})
        optimizer = Muon(groups, lr=1.0, weight_decay=0.0, config=config)
        model.weight.grad = torch.outer(torch.arange(128.0) - 60, torch.arange(128.0) / 100 - 1)
        optimizer.step()
        spectral[norm] = torch.linalg.matrix_norm(model.weight.detach() - before, 2).item()
        assert optimizer.metrics()["newton_schulz/bounded"] == (norm == "exact")
    # bfloat16 rounds the two results apart.
    assert spectral["exact"] <= 2.01 * spectral["as_is"]
