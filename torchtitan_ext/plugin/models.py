"""Model shapes: the eight of the AMO paper, and small ones for laptops.

torchtitan keeps shapes in Python; ``[model] flavor`` names one. The paper's flavors carry the name
of their family, and so none of torchtitan's is shadowed: its ``0.6B`` has the same shape as
``Qwen3-0.6B``, but starts from other weights.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.models.llama3 import TransformerModelArgs
from torchtitan.models.qwen3 import Qwen3ModelArgs

from amo_dist.operators.patterns import clean_name
from amo_dist.tools.shapes import MODELS, DecoderShape

INIT_STD = 0.02
"""Standard deviation of all linear and embedding weights in the AMO paper; biases start at 0."""

_BYTE_VOCAB = 320
"""257 byte tokens, rounded up so that two to eight ranks can split the head evenly."""


@dataclasses.dataclass
class LlamaArgs(TransformerModelArgs):
    """Llama arguments with the standard deviation of the first weights (``None``: torchtitan's)."""

    init_std: float | None = None


@dataclasses.dataclass
class QwenArgs(Qwen3ModelArgs):
    """Qwen3 arguments with the standard deviation of the first weights (``None``: torchtitan's)."""

    init_std: float | None = None


def _sizes(shape: DecoderShape) -> dict[str, Any]:
    return {
        "dim": shape.dim,
        "n_layers": shape.layers,
        "n_heads": shape.heads,
        "n_kv_heads": shape.kv_heads,
        "init_std": INIT_STD,
    }


def _llama(shape: DecoderShape, vocab_size: int = 128256) -> LlamaArgs:
    """Llama-3.1 with a stated feed-forward width.

    torchtitan computes the width, ``2/3 * 4 * dim`` rounded up to a multiple of ``multiple_of``
    (times a factor that is 1 here): a multiple that is the width itself, where that is not less
    than ``2/3 * 4 * dim``, is rounded up to exactly once.
    """
    assert shape.ffn_dim >= 8 * shape.dim // 3
    return LlamaArgs(
        **_sizes(shape), multiple_of=shape.ffn_dim, vocab_size=vocab_size, rope_theta=500000
    )


def _qwen(shape: DecoderShape, vocab_size: int = 151936) -> QwenArgs:
    """Qwen3 with tied embeddings."""
    return QwenArgs(
        **_sizes(shape),
        hidden_dim=shape.ffn_dim,
        head_dim=shape.head_dim,
        enable_weight_tying=True,
        vocab_size=vocab_size,
        rope_theta=1000000,
    )


_LLAMA = {
    **{name: _llama(shape) for name, shape in MODELS.items() if name.startswith("Llama")},
    # Bytes as tokens. Grouped queries and an uneven feed-forward: every type has its own shape.
    "quickstart": _llama(DecoderShape(4, 192, 576, 6, 2), _BYTE_VOCAB),
    "tiny": _llama(DecoderShape(2, 48, 144, 6, 2), _BYTE_VOCAB),
}

_QWEN = {
    **{name: _qwen(shape) for name, shape in MODELS.items() if name.startswith("Qwen3")},
    "tiny": _qwen(DecoderShape(2, 48, 96, 4, 2, 4 / 3), _BYTE_VOCAB),
}

_FLAVORS: dict[str, dict[str, Any]] = {"llama3": _LLAMA, "qwen3": _QWEN}


def flavors(name: str) -> dict[str, Any]:
    """The project's flavors of model ``name``, by name; fresh, as torchtitan edits them."""
    return {flavor: dataclasses.replace(args) for flavor, args in _FLAVORS.get(name, {}).items()}


def _draw(name: str, weight: torch.Tensor, std: float) -> None:
    """Fill a weight with ``N(0, std^2)``.

    DTensor draws one sequence for a tensor of the world on accelerators alone. On CPU each rank
    would draw the same numbers for its own shard, and a matrix would repeat its rows; so every rank
    draws the whole and keeps its shard, from a seed of its own for each name. Plain tensors get the
    same numbers: one process and DDP start from the weights of FSDP2.
    """
    if weight.device.type != "cpu":
        nn.init.normal_(weight, mean=0.0, std=std)
        return
    text = f"{torch.initial_seed()} {name}".encode()
    seed = int.from_bytes(hashlib.sha256(text).digest()[:8], "little", signed=True)
    generator = torch.Generator().manual_seed(seed)
    whole = torch.empty(weight.shape, dtype=weight.dtype)
    whole.normal_(0.0, std, generator=generator)
    if isinstance(weight, DTensor):
        mesh, placements = weight.device_mesh, weight.placements
        whole = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    weight.copy_(whole)


@functools.cache
def with_init(model_cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass of a torchtitan model that follows ``init_std`` of its arguments."""

    class Model(model_cls):  # type: ignore[misc, valid-type]
        def init_weights(self, buffer_device: torch.device | None = None) -> None:
            super().init_weights(buffer_device=buffer_device)
            std = getattr(self.model_args, "init_std", None)
            if std is None:
                return
            for name, module in self.named_modules():
                if isinstance(module, (nn.Linear, nn.Embedding)):
                    _draw(clean_name(f"{name}.weight"), module.weight, std)
                    bias = getattr(module, "bias", None)
                    if bias is not None:
                        nn.init.zeros_(bias)

    Model.__name__ = Model.__qualname__ = model_cls.__name__
    return Model
