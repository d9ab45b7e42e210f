"""The spectrum of a matrix and the errors of schedules on it, against decompositions."""

from __future__ import annotations

import itertools
import math
from unittest import mock

import pytest
import torch
from torch import Tensor

from amo_dist.engine.observe import coefficient_table
from amo_dist.kernels.spectrum import SMALL, distances, ns_residual, singular_values, spectrum
from amo_dist.schedule.polar_express import schedule_for
from benchmarks.spectra import spectrum as values
from benchmarks.spectra import with_spectrum
from tests.simulated_device import simulated_device

M = SMALL + 12
"""Just above the size from which the Gram matrix is used."""
SCHEDULES = [
    schedule_for(ell, steps)
    for ell, steps in itertools.product((1e-5, 1e-4, 1e-3, 1e-2, 1e-1), range(3, 8))
]
TABLE = coefficient_table(SCHEDULES)


def random(m: int, n: int) -> Tensor:
    return torch.randn(m, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def slow_distances(sigma: Tensor, exact_norm: bool = False) -> Tensor:
    """Errors of `SCHEDULES`, one by one and without padding."""
    found = []
    for schedule in SCHEDULES:
        y = torch.tensor([schedule.image(x) for x in sigma.tolist()], dtype=torch.float64)
        if exact_norm:
            y = y * min(2.0, math.sqrt(len(y)) / y.norm().item())
        found.append(((y - 1) ** 2).mean())
    return torch.stack(found)


def assert_agrees(found: Tensor, expected: Tensor) -> None:
    """Within 1e-6, but for the rounding of p itself: some schedules end 1e-15 from one."""
    difference = (found.sqrt() - expected.sqrt()).abs()
    assert (difference <= 0.5e-6 * expected.sqrt() + 1e-14).all()


@pytest.mark.parametrize("kind", ["decaying", "clustered", "deficient"])
@pytest.mark.parametrize("kappa", [1e1, 1e6])
@pytest.mark.parametrize(("m", "n"), [(64, 192), (M, M), (256, 768)])
def test_errors_are_those_of_a_decomposition(kind: str, kappa: float, m: int, n: int) -> None:
    x = with_spectrum(values(kind, m, kappa), n)
    exact = torch.linalg.svdvals(x)
    expected = exact / (1.01 * exact.norm())
    _, sigma, is_clamped = spectrum(x)
    assert not is_clamped
    for exact_norm in (False, True):
        found = distances(sigma / 1.01, TABLE, exact_norm=exact_norm)
        assert_agrees(found, slow_distances(expected, exact_norm))


def test_ell_is_clamped_by_an_absolute_tau() -> None:
    deficient = with_spectrum(values("deficient", M, 1e3), M)
    full = with_spectrum(values("decaying", 3, 1e6), 3)
    for x, scale, is_felt in ((deficient, 1.0, False), (deficient, 1e-5, True), (full, 1e-5, True)):
        ell, _, is_clamped = spectrum(x * scale)
        assert ell.item() == pytest.approx(1e-10 / scale / x.norm().item(), rel=1e-9)
        assert is_clamped == is_felt


@pytest.mark.parametrize("scale", [1e-9, 1.5e-10, 0.5e-10, 1e-200])
@pytest.mark.parametrize("m", [3, M])
def test_no_value_above_tau_is_no_spectrum(m: int, scale: float) -> None:
    # sigma_max is `scale`, and the largest entry less; sigma_min is half of it, or tau.
    x = with_spectrum(values("decaying", m, 2.0), 2 * m) * scale
    ell, sigma, _ = spectrum(x)
    expected = max(scale / 2, 1e-10) / x.norm().item() if scale > 1e-10 else math.nan
    assert ell.item() == pytest.approx(expected, rel=1e-9, nan_ok=True)
    assert sigma.isnan().all().item() == ell.isnan().item() == (scale < 1e-10)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0])
@pytest.mark.parametrize("shape", [(3, 5), (M, M + 2), (0, 4), (4, 0)])
def test_what_has_no_spectrum_is_nan(shape: tuple[int, int], bad: float) -> None:
    x = random(*shape) if bad else torch.zeros(shape)
    x.view(-1)[:1] = bad
    ell, sigma, _ = spectrum(x)
    assert ell.isnan()
    assert sigma.isnan().all()
    assert sigma.shape == (min(shape),)


@pytest.mark.parametrize("shape", [(1, 9), (5, 8), (M, 2 * M)])
def test_float32_and_the_transpose_have_the_same_bits(shape: tuple[int, int]) -> None:
    x = random(*shape).float()
    before, expected = x.clone(), spectrum(x.double())
    for other in (x, x.mT, x.mT.contiguous()):
        assert all(map(torch.equal, spectrum(other)[:2], expected[:2]))
    assert torch.equal(x, before)
    if shape[0] == 1:
        assert expected[0].item() == pytest.approx(1.0, rel=1e-14)  # rounding of float64


def test_a_failed_decomposition_gives_way_to_the_next(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    x = random(M, 2 * SMALL)
    expected = spectrum(x)
    broken = mock.Mock(side_effect=torch.linalg.LinAlgError("The algorithm failed to converge"))
    monkeypatch.setattr(torch.linalg, "eigvalsh", broken)
    # Right to 1e-7 of the largest singular value both ways, and the spectrum is near flat.
    torch.testing.assert_close(spectrum(x)[1], expected[1], rtol=1e-6, atol=0)
    monkeypatch.setattr(torch.linalg, "svdvals", broken)
    assert spectrum(x)[0].isnan()
    assert caplog.records


def test_a_device_without_room_leaves_a_decomposition_to_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def diagonal(x: Tensor) -> Tensor:
        if not x.is_cpu:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x.diagonal()

    monkeypatch.setattr(torch.linalg, "svdvals", diagonal)
    with simulated_device():
        result = singular_values(torch.eye(3, device="cuda", dtype=torch.float64))
        assert result.is_cuda
        assert result.tolist() == [1.0, 1.0, 1.0]


def test_the_residual_is_that_of_the_short_side() -> None:
    x = with_spectrum(torch.tensor([2.0, 1.0, 0.5], dtype=torch.float64), 7)
    expected = math.sqrt((9 + 0 + 0.75**2) / 3)
    for one in (x, x.mT, torch.stack([x, x])):
        assert ns_residual(one).max().item() == pytest.approx(expected, rel=1e-12)
    assert ns_residual(torch.zeros(2, 3)).item() == 1.0
    assert ns_residual(torch.full((2, 3), math.nan)).isnan()
    assert ns_residual(torch.zeros(0, 3)).isnan()
