"""Newton-Schulz of matrices that a team shares, each member with a slab of the long side.

The Gram matrix of the short side is the sum of those of the slabs, and the rest of a step needs no
other slab. Results are those of the whole matrices to rounding: sums come in another order, and a
member's Gram matrix is rounded to the dtype of the products before it is added to the others.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from amo_dist.kernels.elementwise import largest_entry, wide_dtype
from amo_dist.kernels.plain import Recipe, fused, symmetric_product


class Team(Protocol):
    """Brings together what the members hold, in place; a collective over them.

    What they bring has one shape, is contiguous, and comes in one order on all of them.
    """

    def add(self, values: Tensor) -> None:
        """Elementwise sum over the members, which carries NaN to all."""

    def take_greatest(self, values: Tensor) -> None:
        """Elementwise maximum over the members, which may pass over NaN."""


def orthogonalize_slabs(x: Tensor, recipe: Recipe, team: Team, *, is_tall: bool) -> Tensor:
    """What `amo_dist.kernels.plain` does to whole matrices, by the ``standard`` products.

    Args:
        x: Slabs ``(m, n)`` or ``(b, m, n)`` of matrices of one shape, not empty; not modified. One
            that holds NaN or inf on any member gives NaN on all.
        recipe: Says how.
        team: The members, which all call this at the same time.
        is_tall: Whether the whole matrices have more rows than columns: a slab need not.

    Returns:
        In the shape of ``x``, in ``recipe.dtype``.
    """

    def gram_of(slab: Tensor) -> Tensor:
        gram = symmetric_product(slab.mT if is_tall else slab)
        team.add(gram)
        return gram

    # Contiguous before any sum or product: their bits depend on the strides.
    unit = torch.empty(x.shape, dtype=wide_dtype(x.dtype, recipe.dtype), device=x.device).copy_(x)
    largest = largest_entry(unit)
    team.take_greatest(largest)
    unit.div_(largest.masked_fill_(largest == 0, 1.0))
    gram: Tensor | None = None
    if recipe.preconditioner == "aol":
        wide = gram_of(unit.to(recipe.dtype)).to(unit.dtype)
        row_sums = wide.abs().sum(dim=-1, keepdim=True)
        d = row_sums.rsqrt().masked_fill_(row_sums == 0, 1.0)
        unit.mul_(d.mT if is_tall else d)
        gram = wide.mul_(d).mul_(d.mT).to(recipe.dtype)
    else:
        squares = torch.linalg.vector_norm(unit, dim=(-2, -1), keepdim=True).square_()
        team.add(squares)
        norm = squares.sqrt_().clamp_(min=1.0)
        unit.div_(norm.mul_(recipe.norm_scale).add_(recipe.eps))
    slab = unit.to(recipe.dtype)
    for a, b, c in recipe.coefficients:
        gram = gram_of(slab) if gram is None else gram
        polynomial = symmetric_product(gram, gram, b, c)
        slab = fused(slab, *((slab, polynomial) if is_tall else (polynomial, slab)), a)
        gram = None
    return slab
