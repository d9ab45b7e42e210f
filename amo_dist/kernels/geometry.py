"""Geometry of momentum matrices: the control signal, and the metrics of the pilot study.

All arithmetic is float64, whatever the dtype of the input. ``ell`` is measured by an observation
(see ``spectra``); the metrics come from a singular value decomposition. A momentum matrix must come
in as float32, never as a bf16 copy, whose rounding lifts the small singular values by orders of
magnitude.

The AMO paper reads its threshold ``tau`` in three ways, and so do the metrics:

- ``ell``, the control signal, clamps: ``max(sigma_min, tau)``, tau absolute;
- ``kappa``, ``spectral_entropy`` and ``effective_rank`` drop every singular value that is not above
  tau, tau absolute;
- ``ell_static``, of the offline schedules, clamps relatively: ``max(sigma_min, tau * sigma_max)``.

An absolute tau has the unit of the matrix's own entries. A matrix without any singular value above
an absolute tau is numerically zero. Like a zero matrix, an empty one, or one with a non-finite
entry, it has no geometry: each of its metrics is NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from amo_dist.kernels.sigma_min import first_of
from amo_dist.kernels.spectra import DEFAULT_TAU, no_geometry, validate

ENERGY = 0.99
"""Share of the energy that ``effective_rank`` singular directions hold."""

SPECTRAL_METRICS = (
    *("sigma_min", "sigma_max", "frobenius", "kappa", "ell", "ell_static"),
    *("spectral_entropy", "effective_rank"),
)
"""Metrics of one matrix, from its singular values; see `spectral_metrics`."""


@torch.no_grad()
def spectral_metrics(x: Tensor, *, tau: float = DEFAULT_TAU) -> Tensor:
    """All of `SPECTRAL_METRICS` from one singular value decomposition.

    - ``sigma_min``, ``sigma_max`` and ``frobenius`` are in the unit of ``x``, as they are.
    - ``kappa``: ``sigma_max`` over the least singular value above tau.
    - ``ell`` and ``ell_static``: see the module.
    - ``spectral_entropy``: Shannon's, in nats, of the energies ``sigma_i^2 / sum_j sigma_j^2``:
      zero for rank one, ``log(min(m, n))`` for a flat spectrum. The AMO paper names it without a
      formula; this is the one that shares the energies of the next.
    - ``effective_rank``: fewest singular directions that hold `ENERGY` of the energy.

    Args:
        x: One matrix ``(m, n)``; momentum in float32, never in a narrower copy.
        tau: Threshold, absolute but for ``ell_static``.

    Returns:
        Float64, on the CPU, in the order of `SPECTRAL_METRICS`; NaN where a matrix has no such
        geometry.

    Raises:
        ValueError: Not two dims or a dtype that is not floating.
    """
    # CUDA has no deterministic cumsum, and the other metrics would be thirty small kernels.
    sigma = spectrum(x).cpu()
    if sigma.numel() == 0:
        return sigma.new_full((len(SPECTRAL_METRICS),), float("nan"))
    least, greatest = sigma[-1], sigma[0]
    frobenius = greatest * torch.linalg.vector_norm(sigma / greatest)  # squares stay in range
    kept = torch.where(sigma > tau, sigma, 0.0)
    energies = (kept / greatest).square()
    cumulative = energies.cumsum(0)
    relative = torch.maximum(least, tau * greatest) / frobenius
    values = torch.stack(
        [
            greatest / sigma.masked_fill(sigma <= tau, float("inf")).amin(),
            (least.clamp(min=tau) / frobenius).clamp(max=1.0),
            relative,
            torch.special.entr(energies / cumulative[-1]).sum(),
            (cumulative < ENERGY * cumulative[-1]).sum(dtype=torch.float64) + 1.0,
        ]
    )
    # A matrix that is numerically zero has no geometry; a relative tau knows no such threshold.
    values = torch.where(greatest > tau, values, float("nan"))
    values[2] = torch.where(greatest > 0, relative, float("nan"))
    return torch.cat(
        [torch.stack([least, greatest, torch.where(greatest == 0, 0.0, frobenius)]), values]
    )


def spectrum(x: Tensor) -> Tensor:
    """Singular values of one matrix in descending order.

    Args:
        x: ``(m, n)``, any floating dtype.

    Returns:
        Float64, ``(min(m, n),)``, in the unit of ``x``; NaN where an entry is not finite, or each
        decomposition fails.

    Raises:
        ValueError: Not two dims or a dtype that is not floating.
    """
    validate(x, "(m, n)")
    x = x.to(torch.float64)
    # LAPACK raises on NaN, and on matrices without rows.
    is_decomposed = x.numel() > 0 and bool(torch.isfinite(x).all())
    sigma = first_of(x, torch.linalg.svdvals) if is_decomposed else None
    return x.new_full((min(x.shape),), float("nan")) if sigma is None else sigma


@torch.no_grad()
def ns_residual(x: Tensor) -> Tensor:
    """Normalised Newton-Schulz residual ``||X X^T - I||_F / sqrt(min(m, n))``, short side.

    Args:
        x: Matrices after orthogonalization, shape ``(..., m, n)``.

    Returns:
        Float64, shape ``(...)``; 1 for a zero matrix, NaN for an empty or non-finite one.

    Raises:
        ValueError: Fewer than two dims or a dtype that is not floating.
    """
    validate(x)
    if x.numel() == 0:
        return no_geometry(x)
    x = x.to(torch.float64)
    x = x.mT if x.shape[-2] > x.shape[-1] else x
    size = x.shape[-2]
    defect = x @ x.mT - torch.eye(size, dtype=x.dtype, device=x.device)
    residual: Tensor = torch.linalg.vector_norm(defect, dim=(-2, -1)) / size**0.5
    return residual.masked_fill(~torch.isfinite(residual), float("nan"))
