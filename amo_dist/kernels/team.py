"""Newton-Schulz of matrices that a team shares, each member with a slab of the long side.

The Gram matrix of the short side is the sum of those of the slabs, and the rest of a step needs no
other slab. Results are those of the whole matrices to rounding: sums come in another order, and a
member's Gram matrix is rounded to the dtype of the products before it is added to the others.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from amo_dist.config import Triple
from amo_dist.kernels.elementwise import largest_entry, wide_dtype
from amo_dist.kernels.newton_schulz import TORCH, precondition_aol, standard, symmetric_product


class Team(Protocol):
    """Reductions over the members, in place: collectives that all call in the same order.

    Values are contiguous and have the same shape on all members.
    """

    def add(self, values: Tensor) -> None:
        """Elementwise sum over the members, which carries NaN to all."""

    def take_greatest(self, values: Tensor) -> None:
        """Elementwise maximum over the members, which may pass over NaN."""


def orthogonalize_slabs(
    x: Tensor,
    coefficients: tuple[Triple, ...],
    *,
    norm_scale: float,
    preconditioner: str,
    dtype: torch.dtype,
    team: Team,
    is_tall: bool,
    eps: float = 1e-7,
) -> Tensor:
    """Newton-Schulz of `amo_dist.kernels.newton_schulz` on slabs, in the ``standard`` form.

    Args:
        x: Slabs ``(m, n)`` or ``(b, m, n)`` of matrices of one shape, not empty; not modified. One
            that holds NaN or inf on any member becomes NaN on all.
        coefficients: One ``(a, b, c)`` for each step.
        norm_scale: Safety factor.
        preconditioner: ``"frobenius"`` or ``"aol"``.
        dtype: Dtype of the products and of the result.
        team: Members, which all call this at the same time.
        is_tall: Whether the whole matrices have more rows than columns; a slab need not.
        eps: Addend of the norm, in units of the largest entry.

    Returns:
        Orthogonalized slabs, in the shape of ``x``, in ``dtype``.
    """

    def product(
        slab: Tensor,
        added: Tensor | None = None,
        beta: float = 1.0,
        alpha: float = 1.0,
        *,
        right: Tensor | None = None,
    ) -> Tensor:
        result = symmetric_product(slab, added, beta, alpha, right=right)
        if added is None:
            team.add(result)
        return result

    # Contiguous before any sum or product, whose bits depend on the strides.
    unit = torch.empty(x.shape, dtype=wide_dtype(x.dtype, dtype), device=x.device).copy_(x)
    largest = largest_entry(unit)
    team.take_greatest(largest)
    unit.div_(largest.masked_fill_(largest == 0, 1.0))
    known: Tensor | None = None
    if preconditioner == "aol":
        slab, known = precondition_aol(unit, dtype, product, is_tall)
    else:
        norm: Tensor = torch.linalg.vector_norm(unit, dim=(-2, -1), keepdim=True).square_()
        team.add(norm)
        norm.sqrt_().clamp_(min=1.0)
        slab = unit.div_(norm.mul_(norm_scale).add_(eps)).to(dtype)
    library = TORCH._replace(product=product)
    return standard(slab, coefficients, known, library=library, is_tall=is_tall)


def drop_nonfinite_slabs(updates: Tensor, team: Team) -> Tensor:
    """Zero, in place, the slabs of each matrix that holds NaN or inf on any member.

    Args:
        updates: ``(b, m, n)``, not empty; modified.
        team: Members, which all call this at the same time.

    Returns:
        Flags of the matrices that were zeroed, boolean, ``(b, 1, 1)``, the same on all members.
    """
    flags = (~torch.isfinite(largest_entry(updates))).to(torch.float32)
    team.take_greatest(flags)
    bad = flags > 0
    updates.masked_fill_(bad, 0.0)
    return bad
