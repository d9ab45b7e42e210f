"""Geometry of momentum matrices: the control signal, and the metrics of the pilot study.

Everything is computed in float64, whatever the dtype of the input, and from all singular values
except ``ell``, which needs only the smallest (see ``sigma_min``). A momentum matrix must come in as
float32, never as a bf16 copy, whose rounding lifts the small singular values by orders of
magnitude. All functions are batched: ``(..., m, n)`` gives ``(...)``.

The AMO paper reads its threshold ``tau`` in three ways, and so do these functions:

- ``ell``, the control signal, clamps: ``max(sigma_min, tau)``, tau absolute;
- the metrics (``kappa``, ``spectral_entropy``, ``effective_rank``) drop every singular value that
  is not above tau, tau absolute;
- ``static_ell``, of the offline schedules, clamps relatively: ``max(sigma_min, tau * sigma_max)``.

An absolute tau has the unit of the matrix's own entries. A matrix without any singular value above
an absolute tau is numerically zero, and like a zero matrix, an empty one, or one with a non-finite
entry it has no geometry: every function answers NaN for it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from amo_dist.kernels.elementwise import largest_entry
from amo_dist.kernels.sigma_min import sigma_min

DEFAULT_TAU = 1e-10
DEFAULT_ENERGY = 0.99


@torch.no_grad()
def spectrum(x: Tensor) -> Tensor:
    """Singular values in descending order, float64, in the unit of ``x``.

    Args:
        x: Matrices, shape ``(..., m, n)``, any floating dtype.

    Returns:
        Shape ``(..., min(m, n))``; NaN for a matrix with a non-finite entry.

    Raises:
        ValueError: fewer than two dims or a dtype that is not floating.
    """
    _validate(x)
    if x.numel() == 0:
        return x.new_full((*x.shape[:-2], min(x.shape[-2:])), float("nan"), dtype=torch.float64)
    x = x.to(torch.float64)
    is_finite = torch.isfinite(x).all(dim=-1, keepdim=True).all(dim=-2, keepdim=True)
    # LAPACK raises on NaN, for the whole batch: zeros stand in for such a matrix.
    sigma: Tensor = torch.linalg.svdvals(torch.where(is_finite, x, 0.0))
    return sigma.masked_fill(~is_finite.squeeze(-1), float("nan"))


@torch.no_grad()
def ell(x: Tensor, *, tau: float = DEFAULT_TAU) -> Tensor:
    """The control signal ``max(sigma_min, tau) / ||x||_F``.

    Reading of tau: an absolute clamp, in the unit of ``x`` (the AMO paper, main text). Right to
    1e-3 relative up to a condition number of 1e9, far beyond what float32 entries carry, at a
    fraction of the time of a singular value decomposition; a batch is its loop.

    Args:
        x: Momentum matrices, shape ``(..., m, n)``, float32 or float64.
        tau: Least singular value told apart from zero.

    Returns:
        Float64, shape ``(...)``, in (0, 1]; NaN where there is no geometry (see the module): with
        ``sigma_max <= tau`` the clamp would answer above one for a matrix that is hardest.
    """
    if x.numel() == 0 or x.dim() < 3:
        return _ell(x, tau) if x.numel() and x.dim() == 2 else _no_geometry(x)
    matrices = x.reshape(-1, *x.shape[-2:]).unbind()
    return torch.stack([_ell(matrix, tau) for matrix in matrices]).view(x.shape[:-2])


def _ell(x: Tensor, tau: float) -> Tensor:
    """``ell`` of one matrix, not empty."""
    _validate(x)
    largest = largest_entry(x).item()
    if not 0 < largest < math.inf:
        return _no_geometry(x)
    unit = x.to(torch.float64, copy=True).div_(largest)
    norm = torch.linalg.vector_norm(unit)
    # sigma_max lies between the largest entry and the norm: where tau does too, only the spectrum
    # can tell.
    if largest <= tau:
        return ell_by_svd(x, tau=tau)
    value: Tensor = sigma_min(unit).clamp(min=tau / largest) / norm
    return value.clamp(max=1.0)


def ell_by_svd(x: Tensor, *, tau: float = DEFAULT_TAU) -> Tensor:
    """``ell`` from all singular values: the slow twin.

    Args:
        x: Momentum matrices, shape ``(..., m, n)``, float32 or float64.
        tau: Least singular value told apart from zero.

    Returns:
        As ``ell``.
    """
    sigma = spectrum(x)
    if sigma.shape[-1] == 0:
        return _no_geometry(x)
    value = sigma[..., -1].clamp(min=tau) / _frobenius_norm(sigma)
    return value.masked_fill(~(sigma[..., 0] > tau), float("nan"))


def static_ell(x: Tensor, *, tau: float = DEFAULT_TAU) -> Tensor:
    """``max(sigma_min, tau * sigma_max) / ||x||_F``, from which static schedules are built.

    Reading of tau: a clamp relative to ``sigma_max`` (the AMO paper, static schedules); the result
    does not depend on the unit of ``x``.

    Args:
        x: Matrices, shape ``(..., m, n)``, float32 or float64.
        tau: Least ratio ``sigma / sigma_max`` told apart from zero.

    Returns:
        Float64, shape ``(...)``, in (0, 1]; NaN for a zero, empty or non-finite matrix.
    """
    sigma = spectrum(x)
    if sigma.shape[-1] == 0:
        return _no_geometry(x)
    least = torch.maximum(sigma[..., -1], tau * sigma[..., 0])
    return (least / _frobenius_norm(sigma)).masked_fill(~(sigma[..., 0] > 0), float("nan"))


def kappa(x: Tensor, *, tau: float = DEFAULT_TAU) -> Tensor:
    """Condition number ``sigma_max / min{sigma_i : sigma_i > tau}``.

    Reading of tau: singular values not above it, absolutely, are dropped (the AMO paper, appendix
    on model geometry).

    Args:
        x: Matrices, shape ``(..., m, n)``.
        tau: Threshold in the unit of ``x``.

    Returns:
        Float64, shape ``(...)``, at least 1; NaN where there is no geometry.
    """
    return _kappa(spectrum(x), tau) if x.numel() else _no_geometry(x)


def spectral_entropy(x: Tensor, *, tau: float = DEFAULT_TAU) -> Tensor:
    """Shannon entropy, in nats, of the spectral energy ``sigma_i^2 / sum_j sigma_j^2``.

    Zero for rank one, ``log(min(m, n))`` for a flat spectrum. The AMO paper names the metric
    without a formula; this is the one that shares the energies of ``effective_rank``.

    Reading of tau: singular values not above it, absolutely, are dropped.

    Args:
        x: Matrices, shape ``(..., m, n)``.
        tau: Threshold in the unit of ``x``.

    Returns:
        Float64, shape ``(...)``; NaN where there is no geometry.
    """
    return _spectral_entropy(spectrum(x), tau) if x.numel() else _no_geometry(x)


def effective_rank(
    x: Tensor, *, energy: float = DEFAULT_ENERGY, tau: float = DEFAULT_TAU
) -> Tensor:
    """Fewest singular directions that hold ``energy`` of the spectral energy ``sum sigma_i^2``.

    Reading of tau: singular values not above it, absolutely, are dropped.

    Args:
        x: Matrices, shape ``(..., m, n)``.
        energy: Fraction of the energy, in (0, 1].
        tau: Threshold in the unit of ``x``.

    Returns:
        Float64 whole numbers, shape ``(...)``; NaN where there is no geometry.

    Raises:
        ValueError: ``energy`` out of (0, 1].
    """
    _validate_energy(energy)
    return _effective_rank(spectrum(x), energy, tau) if x.numel() else _no_geometry(x)


@torch.no_grad()
def ns_residual(x: Tensor) -> Tensor:
    """Normalised Newton-Schulz residual ``||X X^T - I||_F / sqrt(min(m, n))``, short side.

    Args:
        x: Matrices after orthogonalization, shape ``(..., m, n)``.

    Returns:
        Float64, shape ``(...)``; 1 for a zero matrix, NaN for an empty or non-finite one.

    Raises:
        ValueError: fewer than two dims or a dtype that is not floating.
    """
    _validate(x)
    if x.numel() == 0:
        return _no_geometry(x)
    x = x.to(torch.float64)
    x = x.mT if x.shape[-2] > x.shape[-1] else x
    size = x.shape[-2]
    defect = x @ x.mT - torch.eye(size, dtype=x.dtype, device=x.device)
    residual: Tensor = torch.linalg.vector_norm(defect, dim=(-2, -1)) / size**0.5
    return residual.masked_fill(~torch.isfinite(residual), float("nan"))


def geometry_metrics(
    x: Tensor, orthogonalized: Tensor | None = None, *, tau: float = DEFAULT_TAU
) -> dict[str, Tensor]:
    """All metrics of the pilot study from one singular value decomposition.

    Args:
        x: Momentum matrices before orthogonalization, shape ``(..., m, n)``.
        orthogonalized: The same after it, where the residual is wanted.
        tau: Threshold in the unit of ``x``; dropping, as in the metrics' own docstrings.

    Returns:
        ``kappa``, ``spectral_entropy``, ``effective_rank``, ``static_ell`` and, where asked for,
        ``ns_residual``: float64, shape ``(...)`` each.
    """
    if x.numel() == 0:
        _validate(x)
        names = ("kappa", "spectral_entropy", "effective_rank", "static_ell")
        metrics = {name: _no_geometry(x) for name in names}
    else:
        sigma = spectrum(x)
        relative = torch.maximum(sigma[..., -1], tau * sigma[..., 0]) / _frobenius_norm(sigma)
        metrics = {
            "kappa": _kappa(sigma, tau),
            "spectral_entropy": _spectral_entropy(sigma, tau),
            "effective_rank": _effective_rank(sigma, DEFAULT_ENERGY, tau),
            "static_ell": relative.masked_fill(~(sigma[..., 0] > 0), float("nan")),
        }
    if orthogonalized is not None:
        metrics["ns_residual"] = ns_residual(orthogonalized)
    return metrics


def _validate(x: Tensor) -> None:
    if x.dim() < 2:
        raise ValueError(f"x: found shape {tuple(x.shape)}, expected (..., m, n)")
    if not x.is_floating_point():
        raise ValueError(f"x.dtype: found {x.dtype}, expected a floating dtype")


def _validate_energy(energy: float) -> None:
    if not 0 < energy <= 1:
        raise ValueError(f"energy: found {energy!r}, expected a fraction in (0, 1]")


def _no_geometry(x: Tensor) -> Tensor:
    _validate(x)
    return torch.full(x.shape[:-2], float("nan"), dtype=torch.float64, device=x.device)


def _frobenius_norm(sigma: Tensor) -> Tensor:
    # Relative to the greatest, so that neither 1e200 nor 1e-200 leaves the range when squared.
    greatest = sigma[..., :1]
    greatest = greatest.masked_fill(greatest == 0, 1.0)
    norm: Tensor = torch.linalg.vector_norm(sigma / greatest, dim=-1) * greatest.squeeze(-1)
    return norm


def _energies(sigma: Tensor, tau: float) -> Tensor:
    """``(sigma_i / sigma_max)^2`` of the singular values above tau, 0 for the others."""
    greatest = sigma[..., :1]
    relative = sigma / greatest.masked_fill(greatest == 0, 1.0)
    energies: Tensor = relative.square().masked_fill(sigma <= tau, 0.0)
    return energies


def _kappa(sigma: Tensor, tau: float) -> Tensor:
    greatest = sigma[..., 0]
    least = sigma.masked_fill(sigma <= tau, float("inf")).amin(dim=-1)
    return (greatest / least).masked_fill(~(greatest > tau), float("nan"))


def _spectral_entropy(sigma: Tensor, tau: float) -> Tensor:
    energies = _energies(sigma, tau)
    p = energies / energies.sum(dim=-1, keepdim=True)
    entropy: Tensor = torch.special.entr(p).sum(dim=-1)
    return entropy.masked_fill(~(sigma[..., 0] > tau), float("nan"))


def _effective_rank(sigma: Tensor, energy: float, tau: float) -> Tensor:
    held = _energies(sigma, tau).cumsum(dim=-1)
    is_short = held < energy * held[..., -1:]
    rank = is_short.sum(dim=-1, dtype=torch.float64) + 1.0
    return rank.masked_fill(~(sigma[..., 0] > tau), float("nan"))
