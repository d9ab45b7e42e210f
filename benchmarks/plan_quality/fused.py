"""Modules that store several matrices in one weight, and a diffusion transformer made of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.plan_quality.model import Architecture, Attention, FeedForward, angles

IMAGE, PATCH, CLASSES = 16, 4, 8
"""Side of an image and of a patch in pixels, and kinds of images."""
Images = tuple[Tensor, Tensor, Tensor, Tensor]


class FusedAttention(Attention):
    """Queries, keys and values in one weight, one behind the other."""

    def __init__(self, sizes: Architecture) -> None:
        super().__init__(sizes)
        self.parts = [self.wq.out_features, self.wk.out_features, self.wv.out_features]
        del self.wq, self.wk, self.wv
        self.wqkv = nn.Linear(sizes.dim, sum(self.parts), bias=False)

    def project(self, x: Tensor) -> Sequence[Tensor]:
        return self.wqkv(x).split(self.parts, dim=-1)


class PackedFeedForward(nn.Module):
    """Gate and up in one weight."""

    def __init__(self, sizes: Architecture) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(sizes.dim, 2 * sizes.ffn_dim, bias=False)
        self.down_proj = nn.Linear(sizes.ffn_dim, sizes.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(functional.silu(gate) * up)


class Experts(nn.Module):
    """The feed-forward layers of all experts, ``(num_experts * hidden, dim)`` each."""

    def __init__(self, sizes: Architecture, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        for name in ("w1", "w2", "w3"):
            self.register_parameter(name, nn.Parameter(torch.empty(sizes.ffn_dim, sizes.dim)))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        hidden = functional.silu(x @ self.w1.T) * (x @ self.w3.T)
        hidden = hidden.unflatten(-1, (self.num_experts, -1)) * weights.unsqueeze(-1)
        return hidden.flatten(-2) @ self.w2


class Mixture(nn.Module):
    """Two of eight experts a token; the experts share ``ffn_dim``."""

    num_experts, num_chosen, bias_rate = 8, 2, 1e-3

    def __init__(self, sizes: Architecture) -> None:
        super().__init__()
        self.router = nn.Linear(sizes.dim, self.num_experts, bias=False)
        self.experts = Experts(sizes, self.num_experts)
        self.register_buffer("balance", torch.zeros(self.num_experts))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).sigmoid()
        places = (scores + self.balance).topk(self.num_chosen).indices
        chosen = torch.zeros_like(scores).scatter(-1, places, 1.0)
        if torch.is_grad_enabled():  # DeepSeek V3's balance (arXiv 2412.19437), without a loss
            loads = chosen.mean((0, 1))
            self.balance += self.bias_rate * (loads.mean() - loads).sign()
        weights = scores * chosen
        return self.experts(x, weights / weights.sum(-1, keepdim=True))


class NoncausalAttention(FusedAttention):
    is_causal = False


class DiffusionBlock(nn.Module):
    """A block of DiT (arXiv 2212.09748): ``modulation`` gives two shifts, scales and gates."""

    def __init__(self, sizes: Architecture) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(sizes.dim, elementwise_affine=False)
        self.modulation = nn.Linear(sizes.dim, 6 * sizes.dim)
        self.attention = NoncausalAttention(sizes)
        self.feed_forward = FeedForward(sizes)

    def forward(self, x: Tensor, condition: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        parts = self.modulation(functional.silu(condition)).unsqueeze(1).chunk(6, dim=-1)
        shift, scale, gate, shift_2, scale_2, gate_2 = parts
        x = x + gate * self.attention(self.norm(x) * (1 + scale) + shift, rotation)
        return x + gate_2 * self.feed_forward(self.norm(x) * (1 + scale_2) + shift_2)


class DiffusionTransformer(nn.Module):
    """Noisy images ``(batch, tokens, PATCH**2)``, times and classes to the flow of each pixel.

    Args:
        sizes: Sizes of the blocks. Weights are drawn from N(0, 0.02^2) by torch's global generator;
            modulations and the last projection begin at 0, as in DiT.
    """

    def __init__(self, sizes: Architecture) -> None:
        super().__init__()
        self.head_dim = sizes.head_dim
        self.patch_embedding = nn.Linear(PATCH**2, sizes.dim)
        self.position_embedding = nn.Parameter(torch.empty((IMAGE // PATCH) ** 2, sizes.dim))
        self.class_embedding = nn.Embedding(CLASSES, sizes.dim)
        self.time_embedding = nn.Sequential(
            nn.Linear(sizes.dim, sizes.dim), nn.SiLU(), nn.Linear(sizes.dim, sizes.dim)
        )
        self.layers = nn.ModuleList(DiffusionBlock(sizes) for _ in range(sizes.num_layers))
        self.norm = nn.LayerNorm(sizes.dim)
        self.output = nn.Linear(sizes.dim, PATCH**2)
        for name, parameter in self.named_parameters():
            if name.startswith("output") or "modulation" in name or name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor, times: Tensor, classes: Tensor) -> Tensor:
        frequencies = torch.logspace(0, 3, self.time_embedding[0].in_features // 2)
        phases = times.unsqueeze(1) * frequencies
        embedded = self.time_embedding(torch.cat((phases.cos(), phases.sin()), dim=-1))
        condition = embedded + self.class_embedding(classes)
        x, rotation = (
            self.patch_embedding(x) + self.position_embedding,
            angles(x.shape[1], self.head_dim),
        )
        for layer in self.layers:
            x = layer(x, condition, rotation)
        return self.output(self.norm(x))

    def loss(self, x: Tensor, noise: Tensor, times: Tensor, classes: Tensor) -> Tensor:
        """Mean squared error of the flow from images to noise (flow matching)."""
        at = times[:, None, None]
        return (self(torch.lerp(x, noise, at), times, classes) - (noise - x)).square().mean()


def images(batch: int, seed: int) -> Iterator[Images]:
    """Endless images of two bright shapes each, their noise, times and classes, from a seed alone.

    The class says the form of the shapes, from diamonds to squares, and whether they are hollow.
    """
    generator = torch.Generator().manual_seed(seed)
    side = torch.linspace(-1, 1, IMAGE)
    y, x = torch.meshgrid(side, side, indexing="ij")
    while True:
        classes = torch.randint(CLASSES, (batch,), generator=generator)
        draws = torch.rand(6, batch, 2, 1, 1, generator=generator)
        angle, brightness = 2 * torch.pi * draws[2], 0.5 + 0.5 * draws[3]
        u, v = x - 1.2 * (draws[0] - 0.5), y - 1.2 * (draws[1] - 0.5)
        u, v = u * angle.cos() + v * angle.sin(), v * angle.cos() - u * angle.sin()
        power = 2.0 ** (classes // 2)[:, None, None, None]
        radii = 0.25 + 0.5 * draws[4:]
        distance = ((u / radii[0]).abs() ** power + (v / radii[1]).abs() ** power) ** (1 / power)
        shapes = torch.sigmoid(16 * (1 - distance))
        is_hollow = (classes % 2)[:, None, None, None]
        shapes = brightness * (shapes - is_hollow * torch.sigmoid(16 * (0.6 - distance)))
        pixels = 2 * shapes.amax(1) - 1
        tokens = functional.unfold(pixels.unsqueeze(1), PATCH, stride=PATCH).mT
        noise = torch.randn(tokens.shape, generator=generator)
        yield tokens, noise, torch.rand(batch, generator=generator), classes
