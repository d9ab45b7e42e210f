"""Peak learning rate from the scaling law of the AMO paper."""

from __future__ import annotations

FACTOR, PARAMS_EXPONENT, TOKENS_EXPONENT = 38.4588e-4, -0.2219, -0.3509


def scaling_law_lr(params_b: float, tokens_b: float) -> float:
    """Peak learning rate, ``1e-4 * 38.4588 * N^-0.2219 * D^-0.3509``.

    Source: the AMO paper, for AdamW and the Muon family alike. It takes the nominal size of a
    model, 0.6 for one of 596,049,920 parameters (which would give 1.804e-3 instead of 1.801e-3).

    Args:
        params_b: ``N``, parameters in billions, above 0.
        tokens_b: ``D``, training tokens in billions, above 0.
    """
    return float(FACTOR * params_b**PARAMS_EXPONENT * tokens_b**TOKENS_EXPONENT)
