"""Model shapes: the eight of the AMO paper, and small ones for laptops.

torchtitan keeps shapes in Python; ``[model] flavor`` names one. The Llama feed-forward width is
``4 * dim * 2/3 * ffn_dim_multiplier``, rounded up to a multiple of ``multiple_of``.
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


_llama = functools.partial(
    LlamaArgs, vocab_size=128256, multiple_of=256, rope_theta=500000, init_std=INIT_STD
)
_qwen = functools.partial(
    QwenArgs,
    vocab_size=151936,
    rope_theta=1000000,
    enable_weight_tying=True,
    init_std=INIT_STD,
)

_LLAMA = {
    "75M": _llama(dim=256, n_layers=12, n_heads=8, n_kv_heads=2),
    "480M": _llama(dim=1024, n_layers=16, n_heads=8, n_kv_heads=2, ffn_dim_multiplier=1.3),
    "760M": _llama(dim=1536, n_layers=12, n_heads=12, n_kv_heads=3, ffn_dim_multiplier=1.3),
    "1.4B": _llama(dim=2048, n_layers=16, n_heads=16, n_kv_heads=4, ffn_dim_multiplier=1.3),
    # Bytes as tokens. Grouped queries and an uneven feed-forward: every type has its own shape.
    "quickstart": _llama(
        dim=192, n_layers=4, n_heads=6, n_kv_heads=2, vocab_size=_BYTE_VOCAB, multiple_of=96
    ),
    "tiny": _llama(
        dim=48, n_layers=2, n_heads=6, n_kv_heads=2, vocab_size=_BYTE_VOCAB, multiple_of=24
    ),
}

_QWEN = {
    "70M": _qwen(dim=256, n_layers=20, n_heads=8, n_kv_heads=4, head_dim=128, hidden_dim=1024),
    "300M": _qwen(dim=768, n_layers=20, n_heads=12, n_kv_heads=4, head_dim=128, hidden_dim=3072),
    "0.6B": _qwen(dim=1024, n_layers=28, n_heads=16, n_kv_heads=8, head_dim=128, hidden_dim=3072),
    "1.7B": _qwen(dim=2048, n_layers=28, n_heads=16, n_kv_heads=8, head_dim=128, hidden_dim=6144),
    "tiny": _qwen(
        dim=48,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=16,
        hidden_dim=96,
        vocab_size=_BYTE_VOCAB,
    ),
}

_FLAVORS: dict[str, dict[str, Any]] = {"llama3": _LLAMA, "qwen3": _QWEN}


def flavors(name: str) -> dict[str, Any]:
    """Flavors that the project adds to model ``name``, by name; fresh, for torchtitan edits them.

    A flavor of torchtitan with the name of one of the paper's has its shape, and is replaced for
    the sake of the initialization.
    """
    return {flavor: dataclasses.replace(args) for flavor, args in _FLAVORS[name].items()}


def _draw(name: str, weight: torch.Tensor, std: float) -> None:
    """Fill a weight with ``N(0, std^2)``.

    DTensor draws one sequence for a tensor of the world on accelerators alone. On CPU each rank
    would draw the same numbers for its own shard, and a matrix would repeat its rows; so every rank
    draws the whole and keeps its shard, from a seed of its own for each name.
    """
    if not isinstance(weight, DTensor) or weight.device.type != "cpu":
        nn.init.normal_(weight, mean=0.0, std=std)
        return
    text = f"{torch.initial_seed()} {name}".encode()
    seed = int.from_bytes(hashlib.sha256(text).digest()[:8], "little", signed=True)
    generator = torch.Generator().manual_seed(seed)
    whole = torch.empty(weight.shape, dtype=weight.dtype)
    whole.normal_(0.0, std, generator=generator)
    shard = distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None)
    weight.copy_(shard)


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
