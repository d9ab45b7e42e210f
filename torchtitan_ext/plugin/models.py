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

from amo_dist.operators import clean_name

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


def _llama(
    dim: int, n_layers: int, n_heads: int, n_kv_heads: int, hidden_dim: int, **changes: Any
) -> LlamaArgs:
    """Llama-3.1 with a stated feed-forward width.

    torchtitan computes the width, ``2/3 * 4 * dim`` rounded up to a multiple of ``multiple_of``
    (times a factor that is 1 here): a multiple that is the width itself, where that is not less
    than ``2/3 * 4 * dim``, is rounded up to exactly once.
    """
    assert hidden_dim >= 8 * dim // 3
    args = {"vocab_size": 128256, "rope_theta": 500000, "init_std": INIT_STD, **changes}
    return LlamaArgs(
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        multiple_of=hidden_dim,
        **args,
    )


def _qwen(
    dim: int,
    n_layers: int,
    n_heads: int,
    n_kv_heads: int,
    hidden_dim: int,
    q_ratio: float,
    **changes: Any,
) -> QwenArgs:
    """Qwen3 with tied embeddings and queries of ``q_ratio * dim`` columns."""
    args = {"vocab_size": 151936, "rope_theta": 1000000, "init_std": INIT_STD, **changes}
    return QwenArgs(
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        hidden_dim=hidden_dim,
        head_dim=round(q_ratio * dim / n_heads),
        enable_weight_tying=True,
        **args,
    )


_LLAMA = {
    "Llama-3.1-75M": _llama(256, 12, 8, 2, 768),
    "Llama-3.1-480M": _llama(1024, 16, 8, 2, 3584),
    "Llama-3.1-760M": _llama(1536, 12, 12, 3, 5376),
    "Llama-3.1-1.4B": _llama(2048, 16, 16, 4, 7168),
    # Bytes as tokens. Grouped queries and an uneven feed-forward: every type has its own shape.
    "quickstart": _llama(192, 4, 6, 2, 576, vocab_size=_BYTE_VOCAB),
    "tiny": _llama(48, 2, 6, 2, 144, vocab_size=_BYTE_VOCAB),
}

_QWEN = {
    "Qwen3-70M": _qwen(256, 20, 8, 4, 1024, 4.0),
    "Qwen3-300M": _qwen(768, 20, 12, 4, 3072, 2.0),
    "Qwen3-0.6B": _qwen(1024, 28, 16, 8, 3072, 2.0),
    "Qwen3-1.7B": _qwen(2048, 28, 16, 8, 6144, 1.0),
    "tiny": _qwen(48, 2, 4, 2, 96, 4 / 3, vocab_size=_BYTE_VOCAB),
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
