"""Float32 values into bfloat16 tensors: rounded stochastically, or with a float32 remainder.

Rounded to nearest, an update below half the spacing of a parameter (2^-9 of it, relatively) is lost
whole, step after step. All functions are elementwise and exact, so every device has the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDED_OFF = "rounded_off"
"""Name of an optimizer's state: float32, the remainder that rounding took off a parameter."""
_WORD = 0xFFFFFFFF


def split_into(wide: Tensor, rounded: Tensor, remainder: Tensor) -> None:
    """Write the nearest bfloat16 and the remainder: their sum is the number again, exactly.

    The remainder begins as zeros, whatever the parameter. A parameter that the user overwrites
    keeps its old remainder: at most half of the spacing of its old value.

    Args:
        wide: Values, float32.
        rounded: Nearest values, bfloat16, written.
        remainder: Differences, float32, written.
    """
    rounded.copy_(wide)
    remainder.copy_(wide).sub_(rounded)


def round_stochastically(wide: Tensor, bits: Tensor, out: Tensor) -> None:
    """Round up with the probability that makes the expectation the value itself.

    Args:
        wide: Values, float32.
        bits: Random integers, int32, uniform in [0, 2^16).
        out: Rounded values, bfloat16, written.
    """
    # The lower half carries into the kept one where it and the random bits exceed 2^16.
    out.view(torch.int16).copy_((wide.view(torch.int32) + bits) >> 16)


def random_bits(key: int, rows: Tensor, columns: Tensor) -> Tensor:
    """Uniform integers in [0, 2^16) as a function of key, row and column alone.

    Args:
        key: Key of the stream, 62 bits at most.
        rows: Row numbers, int64, 1-D, not negative, below 2^62.
        columns: Column numbers, int64, 1-D, not negative, below 2^32.

    Returns:
        int32, ``(len(rows), len(columns))``.
    """
    row_keys = _mix((rows & _WORD) ^ (key & _WORD)) ^ _mix((rows >> 32) ^ (key >> 32) ^ 0x5BD1E995)
    return (_mix(_mix(row_keys).unsqueeze(1) ^ columns) >> 16).int()


def _mix(x: Tensor) -> Tensor:
    """A bijection of [0, 2^32) without visible structure (Wellons, "hash-prospector").

    Its factors are below 2^31, so that no product of int64 overflows.
    """
    x = (x ^ (x >> 16)).mul_(0x21F0AAAD).bitwise_and_(_WORD)
    x = (x ^ (x >> 15)).mul_(0x735A2D97).bitwise_and_(_WORD)
    return x ^ (x >> 15)
