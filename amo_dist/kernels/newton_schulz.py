"""Newton-Schulz orthogonalization of plain local matrices.

An odd quintic ``p(x) = a x + b x^3 + c x^5`` applied to a matrix acts on its singular values alone:
``p(X) = a X + (b A + c A A) X`` with ``A = X X^T``. Composed polynomials that send every singular
value in ``[ell, 1]`` close to one therefore send a matrix close to its polar factor, with matrix
products only. Source: the AMO paper; the quintic form goes back to Muon (Jordan et al., 2024).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from amo_dist.kernels.backends import Backend, choose_backend, iterate, short_side
from amo_dist.kernels.elementwise import largest_entry, wide_dtype
from amo_dist.kernels.scratch import scratch

Triple = tuple[float, float, float]

PRECONDITIONERS = ("frobenius", "aol")

_LEAST_NORM = 2.0**-32
"""Squares of the entries behind a norm of this size, or its inverse, are in float32's range."""
_LEAST_SEEN = 2.0**-9
"""Of the spacing of a dtype at one: what is added to a divisor below that, rounding swallows."""


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
    the normalized matrix is rounded once to ``dtype`` for the products. Nothing here waits for the
    device.

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
            ``triton``; see ``backends``. The choice depends on shape, coefficients, dtype and
            device type alone.

    Returns:
        Contiguous tensor of the shape of ``x`` in ``dtype``. An all-zero matrix gives zeros; one
        with a NaN or infinite entry gives NaN in every entry.

    Raises:
        ValueError: fewer than two dims, a dtype that is not floating, no coefficients, an unknown
            preconditioner or backend, a backend that cannot run here, or ``norm_scale`` that is not
            positive.

    On CPU a batch equals the loop over its matrices bit for bit (it is that loop: batched products
    gain nothing there); on other devices a batch runs as batched products.
    """
    _validate(x, coefficients, norm_scale, preconditioner, dtype)
    if x.numel() == 0:
        return torch.zeros(x.shape, dtype=dtype, device=x.device)
    how = choose_backend(
        x.shape, coefficients, dtype=dtype, device_type=x.device.type, requested=backend
    )
    args = (coefficients, norm_scale, preconditioner, dtype, eps, how)
    if x.dim() == 2:
        return _orthogonalize(x, *args)
    batch = x.reshape(-1, *x.shape[-2:])
    if x.device.type != "cpu":
        return _orthogonalize(batch, *args).view(x.shape)
    out = torch.empty(batch.shape, dtype=dtype, device=x.device)
    for matrix, result in zip(batch, out, strict=True):
        result.copy_(_orthogonalize(matrix, *args))
    return out.view(x.shape)


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


def _orthogonalize(
    x: Tensor,
    coefficients: Sequence[Triple],
    norm_scale: float,
    preconditioner: str,
    dtype: torch.dtype,
    eps: float,
    backend: Backend,
) -> Tensor:
    """The same for one matrix ``(m, n)`` or one batch ``(b, m, n)``, not empty."""
    # The kernel reads rows of the short side; products of PyTorch take tall matrices as they are.
    is_turned = backend.name == "triton" and x.shape[-2] > x.shape[-1]
    x = x.mT if is_turned else x
    gram: Tensor | None = None
    if preconditioner == "aol":
        first, gram = _precondition_aol(_scale_largest_entry_to_one(x, dtype), dtype)
    elif x.device.type == "cpu" and x.dim() == 2:
        first = _normalized_on_cpu(x, norm_scale, dtype, eps)
    else:
        first = _normalized(_scale_largest_entry_to_one(x, dtype), norm_scale, dtype, eps)
    result = iterate(first, coefficients, backend, gram)
    return result.mT.contiguous() if is_turned else result


def _normalized(unit: Tensor, norm_scale: float, dtype: torch.dtype, eps: float) -> Tensor:
    """``unit / (norm_scale * ||unit||_F + eps)``, each matrix, in ``dtype``."""
    # The norm is at least one save for zero matrices: the clamp turns 0 / 0 into 0 / 1.
    norm = torch.linalg.vector_norm(unit, dim=(-2, -1), keepdim=True).clamp_(min=1.0)
    unit.div_(norm.mul_(norm_scale).add_(eps))  # wide, and rounded once by the cast
    return _cast(unit, dtype)


def _normalized_on_cpu(x: Tensor, norm_scale: float, dtype: torch.dtype, eps: float) -> Tensor:
    """The same of a matrix whose largest entry is not scaled to one unless squares need it.

    Powers of two scale it then, which change no bit of the result. Passes over a matrix count: it
    has left the caches since the last one.
    """
    wide = wide_dtype(x.dtype, dtype)
    if not x.is_contiguous():  # bits of a sum depend on the strides
        x = scratch("contiguous", x.shape, x.dtype, x.device).copy_(x)
    norm = torch.linalg.vector_norm(x, dtype=wide).item()
    if not _LEAST_NORM <= norm <= 1 / _LEAST_NORM:
        largest = largest_entry(x).item()
        if not math.isfinite(largest):
            return scratch("first", x.shape, dtype, x.device).fill_(math.nan)
        exponent = -math.frexp(largest)[1]
        x = scratch("unit", x.shape, wide, x.device).copy_(x)
        # In two, since the float that scales a denormal to one is infinite.
        x.mul_(2.0 ** (exponent // 2)).mul_(2.0 ** (exponent - exponent // 2))
        norm = torch.linalg.vector_norm(x).item()
    divisor = norm * norm_scale
    if eps > _LEAST_SEEN * torch.finfo(dtype).eps:
        divisor += eps * largest_entry(x).item()
    divisor = divisor or 1.0
    if x.dtype in (dtype, wide):
        # Divides wide, even where x is narrow, and rounds once.
        first = scratch("first" if x.dtype == dtype else "unit", x.shape, x.dtype, x.device)
        return _cast(torch.div(x, divisor, out=first), dtype)
    return _cast(scratch("unit", x.shape, wide, x.device).copy_(x).div_(divisor), dtype)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else scratch("first", x.shape, dtype, x.device).copy_(x)


def _scale_largest_entry_to_one(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous float32 or float64 copy of ``x``, each matrix over its largest |entry|.

    On CPU it lives in memory that the next call overwrites.
    """
    wide = wide_dtype(x.dtype, dtype)
    # In the dtype of x, which may be half as long to read; a maximum is the same in any order.
    largest = largest_entry(x).to(wide)
    # Contiguous before any sum or product: their bits depend on the strides.
    unit = scratch("unit", x.shape, wide, x.device).copy_(x)
    # A true division: the reciprocal of a denormal is infinite.
    return unit.div_(largest.masked_fill_(largest == 0, 1.0))


def _precondition_aol(unit: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``diag(d) X`` and ``diag(d) X X^T diag(d)`` with ``d_i = (sum_j |X X^T|_ij)^-1/2``.

    X is ``unit`` or, where that is tall, its transpose.
    """
    cast = short_side(unit.to(dtype))
    gram = (cast @ cast.mT).to(unit.dtype)
    row_sums = gram.abs().sum(dim=-1, keepdim=True)
    # A row of zeros (or one whose squares vanish in dtype) has nothing to scale.
    d = row_sums.rsqrt().masked_fill_(row_sums == 0, 1.0)
    scaled_gram = gram.mul_(d).mul_(d.mT)
    short_side(unit).mul_(d)
    return _cast(unit, dtype), scaled_gram.to(dtype)
