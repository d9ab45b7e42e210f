"""Newton-Schulz orthogonalization of plain local matrices, in one call.

What is computed is spelled out in `amo_dist.kernels.plain`; how a device computes it is decided
where `amo_dist.kernels.devices` makes its kernels. An engine keeps those from step to step; here
they are made for the call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from amo_dist.config import PRECONDITIONERS, Triple
from amo_dist.kernels.devices import check_backend, make_kernels


@torch.no_grad()
def orthogonalize(
    x: Tensor,
    coefficients: Sequence[Triple],
    *,
    norm_scale: float = 1.01,
    preconditioner: str = "frobenius",
    dtype: torch.dtype = torch.bfloat16,
    eps: float = 1e-7,
    backend: str = "auto",
) -> Tensor:
    """Approximate the polar factor ``U V^T`` of each matrix ``U S V^T`` of a batch.

    Norms are taken in float32 (float64 where ``x`` or ``dtype`` is), of matrices scaled by their
    largest absolute entry wherever an entry that the input can hold would overflow or vanish, and
    the normalized matrix is rounded once to ``dtype`` for the products.

    Args:
        x: Matrices, shape ``(..., m, n)``, any floating dtype; not modified. Any size may be 0.
        coefficients: One ``(a, b, c)`` for each step, at least one.
        norm_scale: Safety factor ``s``: the first iterate is ``x / (s * ||x||_F + eps)``. Rounding
            in ``dtype`` may push the largest singular value above one, where steep quintics
            diverge; 1.01 prevents it. Has no part in ``"aol"``.
        preconditioner: ``"frobenius"`` divides by the Frobenius norm. ``"aol"`` scales row ``i`` of
            the short side by ``(sum_j |A_ij|)^-1/2`` with ``A = x x^T`` (almost-orthogonal layers,
            as in Turbo-Muon), which bounds the singular values by one more tightly; the scaled
            ``A`` serves the first step.
        dtype: Floating dtype of the products and of the result.
        eps: Added to the norm in units of the largest entry, hence relative.
        backend: How the steps are run: ``auto``, ``standard``, ``symmetric``, ``gram`` or
            ``triton``. The choice depends on shape, coefficients, dtype and device type alone.

    Returns:
        New contiguous tensor of the shape of ``x`` in ``dtype``. An all-zero matrix gives zeros;
        one with a NaN or infinite entry gives NaN in every entry.

    Raises:
        ValueError: fewer than two dims, a dtype that is not floating, no coefficients, an unknown
            preconditioner or backend, a backend that cannot run here, or ``norm_scale`` that is
            not positive.

    On CPU a batch equals the loop over its matrices bit for bit. Elsewhere it runs as batched
    products.
    """
    _validate(x, coefficients, norm_scale, preconditioner, dtype)
    check_backend("backend", backend, dtype, x.device)
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=dtype, device=x.device)
    kernels = make_kernels(x.device, ns_dtype=dtype, ns_backend=backend, cuda_graphs=False)
    matrices = x.reshape(-1, *x.shape[-2:]).unbind()
    orthogonalizer = kernels.orthogonalizer(
        len(matrices), x.shape[-2:], coefficients, norm_scale, preconditioner, eps=eps
    )
    # With the kernels gone nobody else holds the memory that the result lies in.
    return orthogonalizer.run(matrices).view(x.shape)


def _validate(
    x: Tensor,
    coefficients: Sequence[Triple],
    norm_scale: float,
    preconditioner: str,
    dtype: torch.dtype,
) -> None:
    if x.dim() < 2:
        raise ValueError(f"x: found shape {tuple(x.shape)}, expected (..., m, n)")
    for field, found in (("x.dtype", x.dtype), ("dtype", dtype)):
        if not found.is_floating_point:
            raise ValueError(f"{field}: found {found}, expected a floating dtype")
    if len(coefficients) == 0:
        raise ValueError("coefficients: found none, expected one (a, b, c) for each step")
    if not norm_scale > 0:
        raise ValueError(f"norm_scale: found {norm_scale!r}, expected a number > 0")
    if preconditioner not in PRECONDITIONERS:
        raise ValueError(
            f"preconditioner: found {preconditioner!r}, expected one of {PRECONDITIONERS}"
        )
