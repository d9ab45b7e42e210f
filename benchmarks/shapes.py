"""The models of the AMO paper, and targets for their operator types."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import nn

from amo_dist.schedule.types import MatrixInfo
from tests.distributed.models import build
from torchtitan_ext.tools.shapes import MODELS as PAPER_MODELS
from torchtitan_ext.tools.shapes import DecoderShape

MODELS: Mapping[str, DecoderShape] = {
    **PAPER_MODELS,
    "small": DecoderShape(4, 96, 288, 4, 4),
    "narrow": DecoderShape(4, 64, 192, 2, 2),
    "experts": DecoderShape(21, 256, 128, 0, 0),
}
"""The paper's models; two of 28 matrices, such as a first try has; 63 experts of 128 x 256."""

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


def block(model: DecoderShape) -> list[MatrixInfo]:
    """The matrices of one block under torchtitan's names, with shapes ``(out, in)``.

    Without heads they are those of the feed-forward alone.
    """
    up, down = (model.ffn_dim, model.dim), (model.dim, model.ffn_dim)
    feed_forward = [
        MatrixInfo("feed_forward.w1.weight", up, "mlp_gate"),
        MatrixInfo("feed_forward.w3.weight", up, "mlp_up"),
        MatrixInfo("feed_forward.w2.weight", down, "mlp_down"),
    ]
    if not model.heads:
        return feed_forward
    q_dim, kv_dim = model.heads * model.head_dim, model.kv_heads * model.head_dim
    return [
        MatrixInfo("attention.wq.weight", (q_dim, model.dim), "attn_q"),
        MatrixInfo("attention.wk.weight", (kv_dim, model.dim), "attn_k"),
        MatrixInfo("attention.wv.weight", (kv_dim, model.dim), "attn_v"),
        MatrixInfo("attention.wo.weight", (model.dim, q_dim), "attn_o"),
        *feed_forward,
    ]


def matrices(model: DecoderShape) -> list[MatrixInfo]:
    """Every matrix, block by block, named after its operator type."""
    return [
        dataclasses.replace(matrix, name=f"layers.{layer}.{matrix.operator_type}")
        for layer in range(model.layers)
        for matrix in block(model)
    ]


def shapes_by_name(model: DecoderShape) -> dict[str, tuple[int, int]]:
    """Shapes of all matrices of a model, under torchtitan's names."""
    return {
        f"layers.{layer}.{matrix.name}": matrix.shape
        for layer in range(model.layers)
        for matrix in block(model)
    }


def make_module(model: DecoderShape, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The matrices of a model with random gradients; nothing that could run forward."""
    generator = torch.Generator().manual_seed(0)

    def random(shape: tuple[int, ...], size: float) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * size).to(dtype)

    module = build({name: random(shape, 0.02) for name, shape in shapes_by_name(model).items()})
    for parameter in module.parameters():
        parameter.grad = random(tuple(parameter.shape), 1e-3)
    return module
