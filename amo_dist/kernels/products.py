"""Products that Newton-Schulz is made of: fused, symmetric by blocks, with long matrices by panels.

All take one matrix or a batch of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from amo_dist.kernels.scratch import scratch


def even_parts(length: int, count: int) -> Iterator[tuple[int, int]]:
    """``(start, stop)`` of consecutive parts whose lengths differ by one at most.

    Args:
        length: Of all together.
        count: Of parts.
    """
    return itertools.pairwise(length * part // count for part in range(count + 1))


def short_side(x: Tensor) -> Tensor:
    """A view of each matrix with as many rows as its short side: ``x``, or ``x.mT`` where tall."""
    return x.mT if x.shape[-2] > x.shape[-1] else x


def square_like(use: str, x: Tensor) -> Tensor:
    """Memory for a square matrix of the short side of each matrix; see `scratch`.

    Args:
        use: Tells apart what is needed at the same time.
        x: ``(..., m, n)``.
    """
    m = min(x.shape[-2:])
    return scratch(use, (*x.shape[:-2], m, m), x.dtype, x.device)


def results(last: Tensor, count: int) -> Iterator[Tensor]:
    """Where ``count`` large products go: into two in turn, the last one into ``last``."""
    other = scratch("iterate", last.shape, last.dtype, last.device)
    return (last if remaining % 2 == 0 else other for remaining in range(count)[::-1])


def plain(left: Tensor, right: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``left right``; `torch.matmul` takes longer to find out which of the two to call."""
    multiply = torch.mm if left.dim() == 2 else torch.bmm
    return multiply(left, right, out=out)


def fused(
    added: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float = 1.0, *, out: Tensor
) -> Tensor:
    """``beta * added + alpha * left right`` with one rounding, which halves the bf16 error."""
    multiply = torch.addmm if left.dim() == 2 else torch.baddbmm
    return multiply(added, left, right, beta=beta, alpha=alpha, out=out)


def times(polynomial: Tensor, x: Tensor, beta: float, panels: int = 1, *, out: Tensor) -> Tensor:
    """``(beta I + polynomial) X`` by panels, X being what `short_side` shows of ``x``."""
    is_tall = x.shape[-2] > x.shape[-1]
    long_dim = x.dim() - 2 if is_tall else x.dim() - 1
    for start, stop in even_parts(x.shape[long_dim], panels):
        part, result = x, out
        if panels > 1:  # slices cost what a small product does not take
            part, result = (each.narrow(long_dim, start, stop - start) for each in (x, out))
        left, right = (part, polynomial) if is_tall else (polynomial, part)
        fused(part, left, right, beta, out=result)
    return out


def symmetric(
    left: Tensor,
    right: Tensor,
    num_blocks: int,
    added: Tensor | None = None,
    beta: float = 1.0,
    alpha: float = 1.0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """``beta * added + alpha * left right^T``, known to be symmetric, by blocks of rows."""
    m = left.shape[-2]
    out = left.new_empty(*left.shape[:-1], m) if out is None else out
    if num_blocks == 1:  # without the slices, which cost what a narrow product does not take
        if added is None:
            return plain(left, right.mT, out=out)
        return fused(added, left, right.mT, beta, alpha, out=out)
    for start, stop in even_parts(m, num_blocks):
        rows, columns = left[..., start:stop, :], right[..., start:, :].mT
        upper = out[..., start:stop, start:]
        if added is None:
            plain(rows, columns, out=upper)
        else:
            fused(added[..., start:stop, start:], rows, columns, beta, alpha, out=upper)
        if stop < m:
            # Both contiguous: a strided transposed copy takes ten times as long.
            below = upper[..., stop - start :].contiguous().mT.contiguous()
            out[..., stop:, start:stop] = below
    return out
