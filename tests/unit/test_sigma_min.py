from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from amo_dist.kernels import sigma_min as module
from amo_dist.kernels.sigma_min import SMALL, sigma_min
from benchmarks.spectra import ell

M = SMALL + 12
"""Just above the size at which the fast roads begin."""
WIDE = 3 * M + 7


def with_spectrum(sigma: Tensor, n: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    m = sigma.numel()
    left, right = (
        torch.linalg.qr(torch.randn(size, m, generator=generator, dtype=torch.float64))[0]
        for size in (m, n)
    )
    return left * sigma @ right.mT


def decaying(kappa: float) -> Tensor:
    return torch.logspace(0, -math.log10(kappa), M, dtype=torch.float64)


def clustered(kappa: float) -> Tensor:
    """Half of the values within a thousandth of the smallest: no gap for Lanczos to find."""
    low = (1 + torch.linspace(1e-3, 0, M // 2, dtype=torch.float64)) / kappa
    return torch.cat((torch.ones(M - M // 2, dtype=torch.float64), low))


def lonely(kappa: float) -> Tensor:
    sigma = torch.ones(M, dtype=torch.float64)
    sigma[-1] = 1 / kappa
    return sigma


@pytest.mark.parametrize("spectrum", [decaying, clustered, lonely])
@pytest.mark.parametrize("kappa", [1.5, 1e5, 1e7, 1e9])
@pytest.mark.parametrize("n", [M, M + 1, WIDE])
def test_hard_spectra(spectrum, kappa: float, n: int, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(torch.linalg, "svdvals", None)  # the fast roads must do
    sigma = spectrum(kappa)
    x = with_spectrum(sigma, n)
    # The promise; rounding in building x itself is kappa * 1e-16 <= 1e-7.
    assert sigma_min(x).item() == pytest.approx(sigma[-1].item(), rel=1e-3)
    assert torch.equal(sigma_min(x.mT), sigma_min(x)) or n == M


def test_ell_scales_and_batches() -> None:
    x = torch.randn(2, M, WIDE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = ell(x)
    assert torch.equal(found, torch.stack([ell(each) for each in x]))
    # A power of two changes no bit of a scaled matrix, up to 1e300.
    assert torch.equal(ell(x * 2.0**900), found)
    assert ell(x.unsqueeze(0)).shape == (1, 2)


@pytest.mark.parametrize("n", [M, WIDE])
@pytest.mark.parametrize("kind", ["zero_row", "equal_rows", "low_rank", "graded"])
def test_singular_matrices_are_clamped(n: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.linalg, "svdvals", None)  # dead rows are no reason to be slow
    x = torch.randn(M, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if kind == "zero_row":
        x[5] = 0
    elif kind == "equal_rows":
        x[5] = x[7]
    elif kind == "low_rank":
        x = x[:, :9] @ x[:9]
    else:
        x[5] *= 1e-250  # its inverse squared overflows
    # sigma_max is about 30, so what rounding leaves (1e-14) lies below the clamp of 1e-10.
    assert ell(x).item() == pytest.approx(1e-10 / x.norm().item(), rel=1e-9)


def test_growth_of_lu_is_caught() -> None:
    # Wilkinson's matrix: partial pivoting grows its last column to 2^(M - 1), so that LU finds a
    # singular matrix where the smallest singular value is 1.4.
    x = torch.eye(M, dtype=torch.float64) - torch.ones(M, M, dtype=torch.float64).tril(-1)
    x[:, -1] = 1
    assert torch.linalg.lu_factor_ex(x)[2].item() == 0
    assert module._by_lu(x) is None
    assert sigma_min(x).item() == pytest.approx(torch.linalg.svdvals(x)[-1].item(), rel=1e-3)


def test_a_wrong_factor_is_found_out_by_the_matrix() -> None:
    x = with_spectrum(lonely(1e4), WIDE)
    wrong = torch.geqrf(x.mT * 1.001)[0][:M].triu()
    solve = torch.linalg.solve_triangular

    def inverse(v: Tensor) -> Tensor:
        return solve(wrong, solve(wrong.mT, v, upper=False), upper=True)

    assert module._smallest(x, inverse) is None


def test_cholesky_gives_way_to_qr(monkeypatch: pytest.MonkeyPatch) -> None:
    # Squared, a condition number of 1e9 is beyond float64: the answer must come from QR.
    calls = []
    qr = module._by_qr
    monkeypatch.setattr(module, "_by_qr", lambda x: calls.append(1) or qr(x))
    sigma_min(with_spectrum(decaying(1e3), WIDE))
    assert not calls
    sigma_min(with_spectrum(lonely(1e9), WIDE))
    assert calls


def test_what_does_not_converge_is_decomposed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_ITERATIONS", 1)
    x = with_spectrum(decaying(1e3), WIDE)
    assert torch.equal(sigma_min(x), torch.linalg.svdvals(x)[-1])
