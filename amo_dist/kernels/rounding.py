"""Float32 master weights of bfloat16 parameters.

Rounded to nearest, an update below half the spacing of a parameter (2^-9 of it, relatively) is lost
whole, step after step. The remainder that rounding took off is therefore kept as state: parameter
and remainder add up to the master weight, exactly. The remainder begins as zeros, whatever the
parameter; a parameter that the user overwrites keeps its old one, which is at most half of the
spacing of its old value.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor

ROUNDED_OFF = "rounded_off"
"""Name of an optimizer's state: float32, the remainder that rounding took off a parameter."""


@contextlib.contextmanager
def master_weight(weight: Tensor, remainder: Tensor | None) -> Iterator[Tensor]:
    """Lend the float32 values of a weight, and round them into it at the end.

    Args:
        weight: Weight, bfloat16; any dtype without a remainder.
        remainder: Remainder, float32, of the same shape; None for a weight that is lent itself.
    """
    if remainder is None:
        yield weight
        return
    wide = weight + remainder
    yield wide
    weight.copy_(wide)
    remainder.copy_(wide).sub_(weight)
