"""What an observation measures of one matrix."""

from __future__ import annotations

import pytest
import torch

from amo_dist.engine.controller import trial_tensor
from amo_dist.kernels.spectra import observe
from amo_dist.schedule.polar_express import composed

TRIALS = [composed(ell, steps) for steps in (3, 5) for ell in (1e-4, 1e-3, 0.1)]


def at_once(matrix: torch.Tensor, *, exact_norm: bool = False) -> torch.Tensor:
    ell, errors = observe(matrix, *trial_tensor(TRIALS), exact_norm=exact_norm)
    assert errors.shape == (2, 6)
    return torch.cat([ell.view(1), errors.view(-1)])


def test_of_an_exact_norm_the_distance_is_that_of_the_direction() -> None:
    """Each of the specification's two forms says the same."""
    torch.manual_seed(0)
    matrix = torch.randn(5, 8) * torch.logspace(0, -2, 5).unsqueeze(1)
    sigmas = torch.linalg.svdvals(matrix.double())
    found = at_once(matrix, exact_norm=True)
    assert torch.equal(found[:7], at_once(matrix)[:7])  # ell and residuals are what they were
    for trial, distance in zip(TRIALS, found[7:].tolist(), strict=True):
        p = [trial.image(x / (1.01 * float(sigmas.norm()))) for x in sigmas.tolist()]
        u = [y * (5 / sum(z * z for z in p)) ** 0.5 for y in p]
        assert distance == pytest.approx(2 * (5 - sum(u)) / 5, rel=1e-6)
        assert distance == pytest.approx(sum((y - 1) ** 2 for y in u) / 5, rel=1e-6)
