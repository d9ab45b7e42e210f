"""Peak learning rate from the scaling law of the AMO paper."""

from __future__ import annotations

import math
from typing import Any

FACTOR, PARAMS_EXPONENT, TOKENS_EXPONENT = 38.4588e-4, -0.2219, -0.3509

TITAN_DEFAULT = 8e-4
"""``optimizer.lr`` where nobody sets it, as torchtitan had it."""


def scaling_law_lr(params_b: float, tokens_b: float) -> float:
    """Peak learning rate, ``1e-4 * 38.4588 * N^-0.2219 * D^-0.3509``.

    Source: the AMO paper, for AdamW and the Muon family alike. It takes the nominal size of a
    model, 0.6 for one of 596,049,920 parameters (which would give 1.804e-3 instead of 1.801e-3).

    Args:
        params_b: ``N``, parameters in billions; above 0.
        tokens_b: ``D``, training tokens in billions; above 0.

    Raises:
        ValueError: For a number that is not finite and above 0.
    """
    for field, found in (("params_b", params_b), ("tokens_b", tokens_b)):
        if not (math.isfinite(found) and found > 0):
            raise ValueError(
                f"optimizer.scaling_law.{field}: found {found!r}, expected a number > 0 (in "
                "billions) with optimizer.lr_from = 'scaling_law'"
            )
    return float(FACTOR * params_b**PARAMS_EXPONENT * tokens_b**TOKENS_EXPONENT)


def resolve(optimizer: Any) -> None:
    """Set ``lr`` of an ``[optimizer]`` section where nobody gave it; idempotent.

    Args:
        optimizer: The section.

    Raises:
        ValueError: If the law lacks a number, or ``lr`` is set to another value beside it.
    """
    if optimizer.lr_from == "value":
        optimizer.lr = TITAN_DEFAULT if optimizer.lr is None else optimizer.lr
        return
    law = optimizer.scaling_law
    lr = scaling_law_lr(law.params_b, law.tokens_b)
    if optimizer.lr not in (None, lr):
        raise ValueError(
            f"optimizer.lr: found {optimizer.lr!r}, expected none with optimizer.lr_from = "
            f"'scaling_law', which gives {lr:.4g} (optimizer.lr_from = 'value' takes yours)"
        )
    optimizer.lr = lr
