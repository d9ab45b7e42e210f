"""The matrices of the models of the AMO paper."""

from __future__ import annotations

import dataclasses

from amo_dist.schedule.types import MatrixInfo


@dataclasses.dataclass(frozen=True)
class Model:
    layers: int
    dim: int
    ffn_dim: int
    heads: int
    kv_heads: int
    q_ratio: int

    def of_layer(self) -> dict[str, tuple[str, tuple[int, int]]]:
        """Operator type and shape ``(rows, columns)`` by the parameter's name in a layer."""
        head_dim = self.q_ratio * self.dim // self.heads
        q, kv = self.heads * head_dim, self.kv_heads * head_dim
        return {
            "attention.wq.weight": ("attn_q", (q, self.dim)),
            "attention.wk.weight": ("attn_k", (kv, self.dim)),
            "attention.wv.weight": ("attn_v", (kv, self.dim)),
            "attention.wo.weight": ("attn_o", (self.dim, q)),
            "feed_forward.w1.weight": ("mlp_gate", (self.ffn_dim, self.dim)),
            "feed_forward.w3.weight": ("mlp_up", (self.ffn_dim, self.dim)),
            "feed_forward.w2.weight": ("mlp_down", (self.dim, self.ffn_dim)),
        }

    def registry(self) -> list[MatrixInfo]:
        return [
            MatrixInfo(f"layers.{layer}.{name}", shape, operator_type)
            for layer in range(self.layers)
            for name, (operator_type, shape) in self.of_layer().items()
        ]

    @property
    def num_elements(self) -> int:
        return sum(info.shape[0] * info.shape[1] for info in self.registry())


MODELS = {
    "Qwen3-70M": Model(20, 256, 1024, 8, 4, 4),
    "Qwen3-300M": Model(20, 768, 3072, 12, 4, 2),
    "Qwen3-0.6B": Model(28, 1024, 3072, 16, 8, 2),
    "Qwen3-1.7B": Model(28, 2048, 6144, 16, 8, 1),
    "Llama-3.1-75M": Model(12, 256, 768, 8, 2, 1),
    "Llama-3.1-480M": Model(16, 1024, 3584, 8, 2, 1),
    "Llama-3.1-760M": Model(12, 1536, 5376, 12, 3, 1),
    "Llama-3.1-1.4B": Model(16, 2048, 7168, 16, 4, 1),
}

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
