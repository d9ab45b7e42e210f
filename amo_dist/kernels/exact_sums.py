"""Sums of squares in integers, which are the same bits in whatever order they are added up.

A matrix that is cut over ranks thus has the same norm as the whole one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def fraction_bits(num_elements: int, decay: float) -> int:
    """Binary places for squares of ``O / sqrt(V)``, as many as their sum leaves in 63 bits.

    An entry is at most ``(1 - decay)^-1/2``, since ``V`` holds ``(1 - decay) * O * O``; twice its
    square leaves room for rounding.

    Args:
        num_elements: Number of entries of the whole matrix.
        decay: Decay of the second moment ``V``.
    """
    return 62 - math.ceil(math.log2(2 * num_elements / (1 - decay)))


def sum_of_squares(values: Tensor, num_bits: int, dim: int | None = None) -> Tensor:
    """``sum(values^2) * 2^num_bits``, int64, 1-D.

    Each square, exact in float64 for float32 values, is rounded to a multiple of ``2^-num_bits``.

    Args:
        values: ``(m, n)``, or any shape with ``dim`` None.
        num_bits: Binary places to keep.
        dim: Dim to sum along; None for the sum over all entries.
    """
    squares = values.to(torch.float64).square_().mul_(2.0**num_bits).round_().to(torch.int64)
    return squares.sum().view(1) if dim is None else squares.sum(dim)


def norm_factor(total: Tensor, num_bits: int, target: float) -> Tensor:
    """``target`` over the norm whose `sum_of_squares` is ``total``; 0 for a norm of 0.

    Args:
        total: Sums of squares, int64.
        num_bits: Binary places that `sum_of_squares` kept.
        target: Frobenius norm to scale to.

    Returns:
        float32, in the shape of ``total``.
    """
    norm = (total.to(torch.float64) * 2.0**-num_bits).sqrt()
    # A number over a tensor is its reciprocal times the number in PyTorch: rounded twice.
    factor = torch.full_like(norm, target).div_(norm)
    return factor.masked_fill_(total == 0, 0.0).to(torch.float32)
