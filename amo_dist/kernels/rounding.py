"""Float32 values into bfloat16 tensors: by chance, or with what is lost kept beside them.

Rounded to nearest, an update below half the spacing of a parameter (2^-9 of it, relatively) is lost
whole, step after step. Everything here is elementwise, and gives the same bits on each device.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDED_OFF = "rounded_off"
"""Name of an optimizer's state: float32, what rounding took off a parameter."""
_WORD = 0xFFFFFFFF


def split_into(wide: Tensor, rounded: Tensor, rest: Tensor) -> None:
    """Write the nearest bfloat16, and what is left: their sum is the number again, exactly.

    The rest begins as zeros, whatever the parameter. Where someone writes the parameter, half of
    the spacing of its old value stays at most.

    Args:
        wide: Float32.
        rounded: bfloat16, written.
        rest: Float32, written.
    """
    rounded.copy_(wide)
    rest.copy_(wide).sub_(rounded)


def round_stochastically(wide: Tensor, bits: Tensor, out: Tensor) -> None:
    """Round up with the probability with which the expectation is the value itself.

    Args:
        wide: Float32.
        bits: int32, uniform in [0, 2^16).
        out: bfloat16, written.
    """
    # What is cut off carries into the kept half where it and the bits exceed 2^16.
    out.view(torch.int16).copy_((wide.view(torch.int32) + bits) >> 16)


def random_bits(key: int, rows: Tensor, columns: Tensor) -> Tensor:
    """Uniform integers in [0, 2^16) as a function of key, row and column alone.

    Args:
        key: Of 62 bits at most.
        rows: int64, 1-D, not negative, below 2^62.
        columns: int64, 1-D, likewise, below 2^32.

    Returns:
        int32, ``(len(rows), len(columns))``.
    """
    row_keys = _mix((rows & _WORD) ^ (key & _WORD)) ^ _mix((rows >> 32) ^ (key >> 32) ^ 0x5BD1E995)
    return (_mix(_mix(row_keys).unsqueeze(1) ^ columns) >> 16).int()


def _mix(x: Tensor) -> Tensor:
    """A bijection of [0, 2^32) without visible structure (Wellons, "hash-prospector").

    Factors are below 2^31, so that no product of int64 overflows.
    """
    x = (x ^ (x >> 16)).mul_(0x21F0AAAD).bitwise_and_(_WORD)
    x = (x ^ (x >> 15)).mul_(0x735A2D97).bitwise_and_(_WORD)
    return x ^ (x >> 15)
