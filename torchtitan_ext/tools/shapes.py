"""Sizes of decoders: the eight models of the AMO paper, or your own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes of a decoder that determine its matrices.

    Attributes:
        layers: Number of blocks.
        dim: Width of the residual stream.
        ffn_dim: Width of the feed-forward.
        heads: Attention heads.
        kv_heads: Heads of keys and values.
        q_ratio: Width of all query heads together over ``dim``.
    """

    layers: int
    dim: int
    ffn_dim: int
    heads: int
    kv_heads: int
    q_ratio: float = 1.0

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return int(self.q_ratio * self.dim) // self.heads


MODELS: Mapping[str, DecoderShape] = {
    "Qwen3-70M": DecoderShape(20, 256, 1024, 8, 4, 4.0),
    "Qwen3-300M": DecoderShape(20, 768, 3072, 12, 4, 2.0),
    "Qwen3-0.6B": DecoderShape(28, 1024, 3072, 16, 8, 2.0),
    "Qwen3-1.7B": DecoderShape(28, 2048, 6144, 16, 8),
    "Llama-3.1-75M": DecoderShape(12, 256, 768, 8, 2),
    "Llama-3.1-480M": DecoderShape(16, 1024, 3584, 8, 2),
    "Llama-3.1-760M": DecoderShape(12, 1536, 5376, 12, 3),
    "Llama-3.1-1.4B": DecoderShape(16, 2048, 7168, 16, 4),
}
"""Models of the AMO paper, by its names."""
