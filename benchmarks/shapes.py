"""The models of the AMO paper, and targets for their operator types."""

from __future__ import annotations

from amo_dist.tools.shapes import MODELS, DecoderShape

__all__ = ["ELL_BY_TYPE", "MODELS", "DecoderShape"]

ELL_BY_TYPE = {
    "attn_q": 3e-4,
    "attn_k": 1.2e-3,
    "attn_v": 4e-3,
    "attn_o": 6e-4,
    "mlp_gate": 8e-3,
    "mlp_up": 1e-2,
    "mlp_down": 5e-3,
}
"""Targets of unequal types, for a locked schedule that no longer is the uniform one."""
