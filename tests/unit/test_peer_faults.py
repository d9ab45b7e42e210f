"""Faults that other optimizers of the Muon family have had, where no other test is their home."""

from __future__ import annotations

import pytest
import torch

from amo_dist.kernels.newton_schulz import NS_BACKENDS, orthogonalize
from amo_dist.schedule.coefficients import named_schedule
from amo_dist.schedule.polar_express import compose


@pytest.mark.parametrize("requested", NS_BACKENDS)
def test_two_schedules_may_share_one_shape(requested: str) -> None:
    """What is remembered for a shape alone runs the first schedule again once another one comes
    with the same shape and number of steps."""
    x = torch.randn(128, 512, generator=torch.Generator().manual_seed(0))
    tables = [compose(1e-3, 5), compose(1e-1, 5), named_schedule("kj").schedule.coefficients]

    def run(table: tuple[tuple[float, float, float], ...]) -> torch.Tensor:
        return orthogonalize(x, table, dtype=torch.float32, backend=requested)

    fresh = [run(table) for table in tables]
    for _ in range(2):
        found = [run(table) for table in tables]
        assert all(map(torch.equal, found, fresh))
    assert not torch.allclose(fresh[0], fresh[1], rtol=0, atol=1e-2)
    assert not torch.allclose(fresh[0], fresh[2], rtol=0, atol=1e-2)
