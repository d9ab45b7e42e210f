from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from amo_dist.kernels.geometry import (
    SPECTRAL_METRICS,
    ns_residual,
    spectral_metrics,
    spectrum,
)
from benchmarks.spectra import ell, ell_by_svd

Metric = Callable[..., Tensor]


def metric_of(name: str) -> Metric:
    """One of the spectral metrics, as a function of one matrix."""
    return lambda x, **given: spectral_metrics(x, **given)[SPECTRAL_METRICS.index(name)]


kappa, spectral_entropy, effective_rank, static_ell = map(
    metric_of, ("kappa", "spectral_entropy", "effective_rank", "ell_static")
)
METRICS = (ell, ell_by_svd, static_ell, kappa, spectral_entropy, effective_rank)


def make(sigma: list[float], m: int, n: int, seed: int = 0) -> Tensor:
    """Float64 ``Q1 diag(sigma) Q2`` of shape ``(m, n)``."""
    generator = torch.Generator().manual_seed(seed)
    k = min(m, n)
    assert len(sigma) == k
    left = torch.linalg.qr(torch.randn(m, k, generator=generator, dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(n, k, generator=generator, dtype=torch.float64))[0]
    return left * torch.tensor(sigma, dtype=torch.float64) @ right.mT


def frobenius(sigma: list[float]) -> float:
    return math.sqrt(math.fsum(s * s for s in sigma))


def test_three_readings_of_tau() -> None:
    # Two singular values at 1e-3 and 1e-6, tau = 1e-4 between them.
    x = make([10.0, 1e-3, 1e-6], 3, 5)
    norm = frobenius([10.0, 1e-3, 1e-6])
    # Clamped to tau; dropped; clamped to tau * sigma_max. Tolerances as above.
    assert ell(x, tau=1e-4).item() == pytest.approx(1e-4 / norm, rel=1e-9)
    assert kappa(x, tau=1e-4).item() == pytest.approx(10.0 / 1e-3, rel=1e-9)
    assert static_ell(x, tau=1e-4).item() == pytest.approx(1e-3 / norm, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_dtypes_are_measured_exactly(dtype: torch.dtype) -> None:
    x = make([1.0, 0.3, 0.1], 3, 6).to(dtype)
    for metric in (*METRICS, ns_residual):
        found = metric(x)
        assert found.dtype == torch.float64
        assert torch.equal(found, metric(x.double()))


@pytest.mark.parametrize("metric", [ell, ns_residual])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_matrices_spoil_nothing_else(metric: Metric, bad: float) -> None:
    x = torch.stack([make([2.0, 1.0, 0.1], 3, 4, seed) for seed in range(6)]).view(2, 3, 3, 4)
    x[1, 0, 2, 3] = bad
    found = metric(x)
    loop = torch.stack([metric(m) for m in x.view(6, 3, 4)]).view(2, 3)
    assert found.shape == (2, 3)
    assert found[1, 0].isnan()
    assert found.isnan().sum() == 1
    # The same LAPACK routine, matrix by matrix.
    assert torch.equal(found.nan_to_num(-1.0), loop.nan_to_num(-1.0))


@pytest.mark.parametrize("metric", [*METRICS, ns_residual])
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0), (3, 0, 4), (0, 3, 4)])
def test_empty(metric: Metric, shape: tuple[int, ...]) -> None:
    if len(shape) > 2 and metric not in (ell, ns_residual):
        with pytest.raises(ValueError, match="expected"):
            metric(torch.empty(shape))
        return
    found = metric(torch.empty(shape))
    assert found.shape == shape[:-2]
    assert found.dtype == torch.float64
    assert found.isnan().all()


@pytest.mark.parametrize("tall", [False, True])
def test_ns_residual(tall: bool) -> None:
    sigma = [1.1, 1.0, 0.9, 0.5]
    x = make(sigma, 4, 9)
    expected = math.sqrt(math.fsum((s * s - 1) ** 2 for s in sigma)) / 2
    assert ns_residual(x.mT if tall else x).item() == pytest.approx(expected, rel=1e-13)


def slow_metrics(x: Tensor, tau: float) -> dict[str, float]:
    """The metrics from the spectrum, one by one."""
    sigma = torch.linalg.svdvals(x.double()).tolist() if x.isfinite().all() and x.numel() else []
    none = dict.fromkeys(SPECTRAL_METRICS, math.nan)
    if not sigma:
        return none
    norm = sigma[0] * frobenius([s / sigma[0] for s in sigma]) if sigma[0] else 0.0
    found = {**none, "sigma_min": sigma[-1], "sigma_max": sigma[0], "frobenius": norm}
    if sigma[0] > 0:
        found["ell_static"] = max(sigma[-1], tau * sigma[0]) / norm
    kept = [s for s in sigma if s > tau]
    if not kept:
        return found
    energies = [(s / sigma[0]) ** 2 for s in kept]
    shares = [energy / math.fsum(energies) for energy in energies]
    ranks = (r for r in range(1, len(shares) + 1) if math.fsum(shares[:r]) >= 0.99)
    return {
        **found,
        "kappa": sigma[0] / kept[-1],
        "ell": min(max(sigma[-1], tau) / norm, 1.0),
        "spectral_entropy": -math.fsum(p * math.log(p) for p in shares),
        "effective_rank": float(next(ranks)),
    }


@pytest.mark.parametrize("tau", [1e-10, 0.5])
@pytest.mark.parametrize(
    "x",
    [
        torch.randn(7, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
        torch.randn(12, 1, generator=torch.Generator().manual_seed(1)),
        torch.diag(torch.tensor([3.0, 1.0, 0.0])),
        1e-12 * torch.randn(4, 5, generator=torch.Generator().manual_seed(2)),
        torch.zeros(3, 4),
        torch.full((2, 2), float("nan")),
        1e18 * torch.randn(5, 5, generator=torch.Generator().manual_seed(3)),
        torch.zeros(0, 4),
    ],
    ids=["wide", "column", "singular", "tiny", "zero", "nan", "large", "empty"],
)
def test_all_metrics_at_once(x: Tensor, tau: float) -> None:
    found = dict(zip(SPECTRAL_METRICS, spectral_metrics(x, tau=tau).tolist(), strict=True))
    for name, value in slow_metrics(x, tau).items():
        # The same formulas of the same spectrum, summed in another order.
        assert found[name] == pytest.approx(value, rel=1e-12, abs=1e-15, nan_ok=True), name


@pytest.mark.parametrize("metric", [*METRICS, ns_residual, spectrum])
def test_mistakes(metric: object) -> None:
    assert callable(metric)
    with pytest.raises(ValueError, match=r"x: found shape \(3,\)"):
        metric(torch.ones(3))
    with pytest.raises(ValueError, match=r"x\.dtype: found torch\.int64"):
        metric(torch.ones(2, 2, dtype=torch.int64))
