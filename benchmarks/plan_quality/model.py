"""A small llama-like decoder in plain PyTorch, in three shapes of attention.

Parameters have torchtitan's names, so that `amo_dist.param_groups` knows their operator types.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclasses.dataclass(frozen=True, slots=True)
class Architecture:
    """Sizes of a model.

    Attributes:
        vocabulary: All bytes, and the end of a document.
    """

    num_heads: int
    num_kv_heads: int
    dim: int = 192
    ffn_dim: int = 704
    num_layers: int = 4
    head_dim: int = 32
    vocabulary: int = 257


ARCHITECTURES = {
    "grouped": Architecture(num_heads=6, num_kv_heads=2),
    "square-kv": Architecture(num_heads=12, num_kv_heads=6),
    "multi-head": Architecture(num_heads=6, num_kv_heads=6),
}
"""Architectures by name: k and v of 64 x 192; k and v square under a wide q; all square."""


class Attention(nn.Module):
    is_causal = True

    def __init__(self, sizes: Architecture) -> None:
        super().__init__()
        self.head_dim = sizes.head_dim
        self.num_groups = sizes.num_heads // sizes.num_kv_heads
        wide, narrow = (n * sizes.head_dim for n in (sizes.num_heads, sizes.num_kv_heads))
        self.wq = nn.Linear(sizes.dim, wide, bias=False)
        self.wk = nn.Linear(sizes.dim, narrow, bias=False)
        self.wv = nn.Linear(sizes.dim, narrow, bias=False)
        self.wo = nn.Linear(wide, sizes.dim, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in self.project(x))
        q, k = rotated(q, *rotation), rotated(k, *rotation)
        k, v = (t.repeat_interleave(self.num_groups, dim=1) for t in (k, v))
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        return self.wo(heads.transpose(1, 2).flatten(2))

    def project(self, x: Tensor) -> Sequence[Tensor]:
        """Queries, keys and values of all heads."""
        return self.wq(x), self.wk(x), self.wv(x)


class FeedForward(nn.Module):
    def __init__(self, sizes: Architecture) -> None:
        super().__init__()
        self.w1 = nn.Linear(sizes.dim, sizes.ffn_dim, bias=False)
        self.w2 = nn.Linear(sizes.ffn_dim, sizes.dim, bias=False)
        self.w3 = nn.Linear(sizes.dim, sizes.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(
        self, sizes: Architecture, attention: type[nn.Module], feed_forward: type[nn.Module]
    ) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.dim)
        self.attention = attention(sizes)
        self.ffn_norm = nn.RMSNorm(sizes.dim)
        self.feed_forward = feed_forward(sizes)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.feed_forward(self.ffn_norm(x))


class Decoder(nn.Module):
    """Tokens ``(batch, sequence)`` to logits ``(batch, sequence, vocabulary)``.

    Args:
        sizes: Sizes of the model. Weights are drawn from N(0, 0.02^2) by torch's global generator.
        attention: Class of the attentions, made of ``sizes``.
        feed_forward: Class of the feed-forward layers, likewise.
    """

    def __init__(
        self,
        sizes: Architecture,
        attention: type[nn.Module] = Attention,
        feed_forward: type[nn.Module] = FeedForward,
    ) -> None:
        super().__init__()
        self.head_dim = sizes.head_dim
        self.tok_embeddings = nn.Embedding(sizes.vocabulary, sizes.dim)
        self.layers = nn.ModuleList(
            Block(sizes, attention, feed_forward) for _ in range(sizes.num_layers)
        )
        self.norm = nn.RMSNorm(sizes.dim)
        self.output = nn.Linear(sizes.dim, sizes.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x, rotation = self.tok_embeddings(tokens), angles(tokens.shape[1], self.head_dim)
        for layer in self.layers:
            x = layer(x, rotation)
        return self.output(self.norm(x))

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy a token."""
        return functional.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())


def angles(length: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary position embedding, ``(length, head_dim / 2)`` each."""
    frequencies = 10_000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    phases = torch.outer(torch.arange(length).float(), frequencies)
    return phases.cos(), phases.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
