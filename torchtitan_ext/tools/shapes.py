"""Matrices of a decoder from its sizes: the eight models of the AMO paper, or your own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from amo_dist.schedule.types import MatrixInfo


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

    def block(self) -> list[MatrixInfo]:
        """List the matrices of one block under torchtitan's names, with shapes ``(out, in)``."""
        q_dim, kv_dim = self.heads * self.head_dim, self.kv_heads * self.head_dim
        up, down = (self.ffn_dim, self.dim), (self.dim, self.ffn_dim)
        return [
            MatrixInfo("attention.wq.weight", (q_dim, self.dim), "attn_q"),
            MatrixInfo("attention.wk.weight", (kv_dim, self.dim), "attn_k"),
            MatrixInfo("attention.wv.weight", (kv_dim, self.dim), "attn_v"),
            MatrixInfo("attention.wo.weight", (self.dim, q_dim), "attn_o"),
            MatrixInfo("feed_forward.w1.weight", up, "mlp_gate"),
            MatrixInfo("feed_forward.w3.weight", up, "mlp_up"),
            MatrixInfo("feed_forward.w2.weight", down, "mlp_down"),
        ]

    def matrices(self) -> list[MatrixInfo]:
        """List every matrix, block by block, named after its operator type."""
        block = self.block()
        return [
            dataclasses.replace(matrix, name=f"layers.{layer}.{matrix.operator_type}")
            for layer in range(self.layers)
            for matrix in block
        ]


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

PLANS: Mapping[str, tuple[int, ...]] = {
    "Qwen3-1.7B": (6, 5, 5, 6, 4, 5, 4),
    "Llama-3.1-760M": (6, 4, 5, 6, 5, 5, 4),
}
"""Newton-Schulz steps after the lock, in the order of `OPERATOR_TYPES`, for the models whose plan
the AMO paper prints (table of locked schedules)."""
