"""Newton-Schulz in its plain form: what is computed, on any device.

An odd quintic ``p(x) = a x + b x^3 + c x^5`` applied to a matrix acts on its singular values alone:
``p(X) = a X + (b A + c A A) X`` with ``A = X X^T``. Composed polynomials that send every singular
value in ``[ell, 1]`` close to one therefore send a matrix close to its polar factor, with matrix
products only. Source: the AMO paper; the quintic form goes back to Muon (Jordan et al., 2024).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from amo_dist.config import Triple
from amo_dist.kernels.cpu.backends import Backend
from amo_dist.kernels.elementwise import largest_entry, wide_dtype


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """What is done to a matrix; see `amo_dist.kernels.newton_schulz.orthogonalize`.

    Attributes:
        coefficients: One ``(a, b, c)`` for each step.
        norm_scale: Safety factor of the Frobenius norm.
        preconditioner: ``"frobenius"`` or ``"aol"``.
        dtype: Of the products and of the result.
        eps: Added to the norm, in units of the largest entry.
        backend: How the steps are run.
    """

    coefficients: tuple[Triple, ...]
    norm_scale: float
    preconditioner: str
    dtype: torch.dtype
    eps: float
    backend: Backend


def first_iterate(x: Tensor, recipe: Recipe, unit: Tensor | None = None) -> tuple[Tensor, ...]:
    """Scale matrices so that no singular value exceeds one, nearly.

    Args:
        x: ``(m, n)`` or ``(b, m, n)``, not empty; not modified.
        recipe: Says how.
        unit: Memory in the shape of ``x``, float32 (float64 where ``x`` or the dtype is).

    Returns:
        The scaled matrices, contiguous, in ``recipe.dtype``; then, where these are known, the Gram
        matrices of their short sides.
    """
    if unit is None:
        unit = torch.empty(x.shape, dtype=wide_dtype(x.dtype, recipe.dtype), device=x.device)
    # In the dtype of x, which may be half as long to read; a maximum is the same in any order.
    largest = largest_entry(x).to(unit.dtype)
    # Contiguous before any sum or product: their bits depend on the strides.
    unit.copy_(x)
    # A true division: the reciprocal of a denormal is infinite.
    unit.div_(largest.masked_fill_(largest == 0, 1.0))
    if recipe.preconditioner == "aol":
        return _precondition_aol(unit, recipe.dtype)
    # The norm is at least one save for zero matrices: the clamp turns 0 / 0 into 0 / 1.
    norm = torch.linalg.vector_norm(unit, dim=(-2, -1), keepdim=True).clamp_(min=1.0)
    unit.div_(norm.mul_(recipe.norm_scale).add_(recipe.eps))
    return (unit.to(recipe.dtype),)


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
    return unit.to(dtype), scaled_gram.to(dtype)


def short_side(x: Tensor) -> Tensor:
    """A view of each matrix with as many rows as its short side: ``x``, or ``x.mT`` where tall."""
    return x.mT if x.shape[-2] > x.shape[-1] else x


def fused(added: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float = 1.0) -> Tensor:
    """``beta * added + alpha * left right`` with one rounding, which halves the bfloat16 error."""
    multiply = torch.addmm if left.dim() == 2 else torch.baddbmm
    return multiply(added, left, right, beta=beta, alpha=alpha)


def symmetric_product(
    x: Tensor, added: Tensor | None = None, beta: float = 1.0, alpha: float = 1.0
) -> Tensor:
    """``beta * added + alpha * x x^T``, or ``x x^T`` alone."""
    if added is not None:
        return fused(added, x, x.mT, beta, alpha)
    # `@` of batches reshapes six times on the way to the same product.
    return torch.mm(x, x.mT) if x.dim() == 2 else torch.bmm(x, x.mT)


def iterate(
    x: Tensor,
    coefficients: tuple[Triple, ...],
    gram: Tensor | None = None,
    product: Callable[..., Tensor] = symmetric_product,
) -> Tensor:
    """Run the steps, of three products each.

    Args:
        x: ``(m, n)`` or ``(b, m, n)``, singular values at most one; not modified.
        coefficients: One triple a step.
        gram: ``A``, the Gram matrix of the short side of ``x``, where it is known.
        product: `symmetric_product`, or a faster one.
    """
    for a, b, c in coefficients:
        gram = product(short_side(x)) if gram is None else gram
        polynomial = product(gram, gram, b, c)
        is_tall = x.shape[-2] > x.shape[-1]
        x = fused(x, *((x, polynomial) if is_tall else (polynomial, x)), a)
        gram = None
    return x
