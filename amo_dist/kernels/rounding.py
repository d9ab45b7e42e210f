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
def master_weight(weight: Tensor, remainder: Tensor) -> Iterator[Tensor]:
    """Lend the master weight of a parameter, or of a part of it, and round it off at the end.

    Args:
        weight: Rounded weight, bfloat16.
        remainder: Remainder, float32, of the same shape.
    """
    wide = weight + remainder
    yield wide
    weight.copy_(wide)
    remainder.copy_(wide).sub_(weight)
