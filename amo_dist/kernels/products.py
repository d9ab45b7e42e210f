"""Products that Newton-Schulz is made of: fused, symmetric by blocks, with long matrices by panels.

All take one matrix or a batch of them, and give calls on memory that is laid out: to be made at
once, or over and over on other values. What a call is made of takes Python as long as a small
product takes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from amo_dist.kernels.scratch import scratch

Call = Callable[[], object]
"""A kernel with its arguments."""


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
    """Where ``count`` large products go: into two places in turn, the last one into ``last``."""
    other = scratch("iterate", last.shape, last.dtype, last.device)
    # Bits of wide products on CPU depend on where their factors begin.
    is_narrow = last.dtype.itemsize < 4
    third = last if is_narrow else scratch("iterate 2", last.shape, last.dtype, last.device)
    turns = (third if remaining % 2 == 0 else other for remaining in range(count)[:0:-1])
    return itertools.chain(turns, [last])


def plain(left: Tensor, right: Tensor, *, out: Tensor) -> Call:
    """``left right``; `torch.matmul` takes longer to find out which of the two to call."""
    multiply = torch.mm if left.dim() == 2 else torch.bmm
    return functools.partial(multiply, left, right, out=out)


def fused(
    added: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float = 1.0, *, out: Tensor
) -> Call:
    """``beta * added + alpha * left right`` with one rounding, which halves the bf16 error."""
    multiply = torch.addmm if left.dim() == 2 else torch.baddbmm
    return functools.partial(multiply, added, left, right, beta=beta, alpha=alpha, out=out)


def times(
    polynomial: Tensor, x: Tensor, beta: float, panels: int = 1, *, out: Tensor
) -> Iterator[Call]:
    """``(beta I + polynomial) X`` by panels, X being what `short_side` shows of ``x``."""
    is_tall = x.shape[-2] > x.shape[-1]
    long_dim = x.dim() - 2 if is_tall else x.dim() - 1
    for start, stop in even_parts(x.shape[long_dim], panels):
        part, result = (each.narrow(long_dim, start, stop - start) for each in (x, out))
        left, right = (part, polynomial) if is_tall else (polynomial, part)
        yield fused(part, left, right, beta, out=result)


def symmetric(
    left: Tensor,
    right: Tensor,
    num_blocks: int,
    added: Tensor | None = None,
    beta: float = 1.0,
    alpha: float = 1.0,
    *,
    out: Tensor,
) -> Iterator[Call]:
    """``beta * added + alpha * left right^T``, known to be symmetric, by blocks of rows."""
    m = left.shape[-2]
    for start, stop in even_parts(m, num_blocks):
        rows, columns = left[..., start:stop, :], right[..., start:, :].mT
        upper = out[..., start:stop, start:]
        if added is None:
            yield plain(rows, columns, out=upper)
        else:
            yield fused(added[..., start:stop, start:], rows, columns, beta, alpha, out=upper)
        if stop < m:
            below = out[..., stop:, start:stop]
            yield functools.partial(_mirror, upper[..., stop - start :], below)


def _mirror(upper: Tensor, below: Tensor) -> None:
    # Both contiguous: a strided transposed copy takes ten times as long.
    below.copy_(upper.contiguous().mT.contiguous())
