"""The ``[model]`` section; model shapes: the eight of the AMO paper, and small ones for laptops.

The paper's flavors carry the name of their family, and so none of torchtitan's is shadowed: its
``0.6B`` has the same shape as ``Qwen3-0.6B``, but starts from other weights.
"""

from __future__ import annotations

import functools
import hashlib
import pkgutil
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
import torchtitan.models
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.models.common.attention import (
    BaseAttention,
    FusedQKVLinear,
    ScaledDotProductAttention,
)
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.llama3 import Llama3Model
from torchtitan.models.qwen3 import Qwen3Model
from torchtitan.protocols.model_spec import ModelSpec

from amo_dist.operators.patterns import clean_name
from torchtitan_ext.imports import import_module
from torchtitan_ext.plugin.parallelize import parallelize
from torchtitan_ext.tools.shapes import MODELS, DecoderShape

INIT_STD = 0.02
"""Standard deviation of all linear and embedding weights in the AMO paper."""

NAMES = sorted(
    module.name
    for module in pkgutil.iter_modules(torchtitan.models.__path__)
    if module.ispkg and module.name not in ("common", "flux")
)
"""torchtitan's language models, under any of which a ``[model]`` section may ask for a size."""

# 257 byte tokens, rounded up so that two to eight ranks can split the head evenly.
_BYTE_VOCAB = 320

# Bound on ``training.seq_len``; rotary tables are cut to it.
_MAX_SEQ_LEN = 131072

FLAVORS: dict[str, dict[str, tuple[DecoderShape, int]]] = {
    "llama3": {
        **{name: (shape, 128256) for name, shape in MODELS.items() if name.startswith("Llama")},
        # Bytes as tokens. Grouped queries and an uneven feed-forward: every type has its own shape.
        "quickstart": (DecoderShape(4, 192, 576, 6, 2), _BYTE_VOCAB),
        "tiny": (DecoderShape(2, 48, 144, 6, 2), _BYTE_VOCAB),
    },
    "qwen3": {
        **{name: (shape, 151936) for name, shape in MODELS.items() if name.startswith("Qwen")},
        "tiny": (DecoderShape(2, 48, 96, 4, 2, 4 / 3), _BYTE_VOCAB),
    },
}
"""Shape and vocabulary size of the project's flavors, by model and flavor."""


@dataclass(kw_only=True, slots=True)
class Model:
    """The ``[model]`` section.

    Attributes:
        name: Model of torchtitan (``llama3``, ``qwen3``, ``deepseek_v3``, ``gpt_oss`` and others),
            or a module with a function ``model_registry`` as torchtitan's have it.
        flavor: Its size: one of :data:`FLAVORS`, or of torchtitan's own.
        attention: Kernel of attention. ``sdpa`` attends to all that comes before in the row, other
            documents as well; it is the only one that trains on a CPU. ``flex`` and ``varlen`` stay
            within a document.
        fuse_qkv: Whether queries, keys and values of the project's flavors are one matrix
            multiplication. torchtitan's own flavors fuse them as torchtitan does. Checkpoints hold
            the model's three matrices either way.
    """

    name: str = "llama3"
    flavor: str = "debugmodel"
    attention: Literal["sdpa", "flex", "varlen"] = "sdpa"
    fuse_qkv: bool = False


def spec(model: Model) -> ModelSpec:
    """Model as torchtitan takes it, for the device at hand.

    Raises:
        ValueError: Name, flavor or attention does not exist.
    """
    is_stock = model.name in NAMES
    path = f"torchtitan.models.{model.name}" if is_stock else model.name
    try:
        make = import_module(path, "model.name").model_registry
    except (ValueError, AttributeError) as error:
        raise ValueError(
            f"model.name: found {model.name!r}, expected one of {', '.join(NAMES)}, or a module "
            f"with a function model_registry(flavor, attn_backend): {error}"
        ) from None
    flavors = FLAVORS.get(model.name, {})
    is_resized = model.flavor in flavors
    # torchtitan's language models know no SDPA by name, but take it in their configs.
    is_sdpa = is_stock and model.attention == "sdpa"
    try:
        stock: ModelSpec = make(
            "debugmodel" if is_resized else model.flavor,
            attn_backend="flex" if is_sdpa else model.attention,
        )
    except KeyError:
        known = ", ".join([*flavors, f"those of {path}"])
        raise ValueError(f"model.flavor: found {model.flavor!r}, expected one of {known}") from None
    config = cast(Decoder.Config, stock.model)
    if is_resized:
        config = _resized(config, *flavors[model.flavor], fuse_qkv=model.fuse_qkv)
    if is_sdpa:
        use_sdpa(config, model.name)
    wrapped = functools.partial(parallelize, stock.parallelize_fn)
    return replace(stock, flavor=model.flavor, model=config, parallelize_fn=wrapped)


def use_sdpa(config: Decoder.Config, name: str) -> None:
    """Let a model attend to all that comes before in a row, as a CPU can.

    Args:
        config: Config of the model; changed in place.
        name: Name of the model, for errors.

    Raises:
        ValueError: For a model with masks of its own: SDPA knows no sliding windows or sinks.
    """
    if getattr(config._owner, "get_attention_masks", 0) is not Decoder.get_attention_masks:
        raise ValueError(f"model.attention: found 'sdpa', expected 'flex' or 'varlen' for {name}")
    for _, attention, _, _ in config.traverse(BaseAttention.Config):
        attention.inner_attention = ScaledDotProductAttention.Config()


def _resized(
    stock: Decoder.Config, shape: DecoderShape, vocab_size: int, *, fuse_qkv: bool
) -> Decoder.Config:
    """A dense model of torchtitan in another size, with the first weights of the AMO paper."""
    init = {"weight": skip_param_init}  # drawn by :class:`LayoutIndependentInit`
    embeddings, head, layer = stock.tok_embeddings, stock.lm_head, stock.layers[0]
    attention = layer.attention
    norm = replace(stock.norm, normalized_shape=shape.dim)
    rope = replace(attention.rope, dim=shape.head_dim, max_seq_len=_MAX_SEQ_LEN)
    qk_norm = attention.qk_norm and replace(attention.qk_norm, normalized_shape=shape.head_dim)
    layers = [
        replace(
            layer,
            attention_norm=replace(norm),
            ffn_norm=replace(norm),
            attention=make_gqa_config(
                dim=shape.dim,
                n_heads=shape.heads,
                n_kv_heads=shape.kv_heads,
                head_dim=attention.head_dim and shape.head_dim,
                wqkv_param_init=init,
                wo_param_init=init,
                inner_attention=replace(attention.inner_attention),
                rope=rope,
                fuse_qkv=fuse_qkv,
                qk_norm=qk_norm,
            ),
            feed_forward=make_ffn_config(
                dim=shape.dim, hidden_dim=shape.ffn_dim, w1_param_init=init, w2w3_param_init=init
            ),
        )
        for _ in range(shape.layers)
    ]
    config_class = {Llama3Model.Config: Llama.Config, Qwen3Model.Config: Qwen.Config}[type(stock)]
    return config_class(
        dim=shape.dim,
        vocab_size=vocab_size,
        tok_embeddings=replace(
            embeddings, num_embeddings=vocab_size, embedding_dim=shape.dim, param_init=init
        ),
        norm=norm,
        lm_head=replace(head, in_features=shape.dim, out_features=vocab_size, param_init=init),
        layers=layers,
        enable_weight_tying=stock.enable_weight_tying,
    )


class LayoutIndependentInit(Decoder):
    """A model whose matrices start as ``N(0, INIT_STD^2)``, the same in every layout."""

    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        """Draw the weights; arguments as in torchtitan."""
        super().init_states(buffer_device=buffer_device)
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                if module.weight.device.type != "cpu":
                    nn.init.normal_(module.weight, std=INIT_STD)
                elif not name.endswith(".wqkv"):
                    _copy_into(module.weight, _initial_weight(name, module.weight.shape))
            elif isinstance(module, FusedQKVLinear) and module.wqkv.weight.device.type == "cpu":
                _copy_into(module.wqkv.weight, _initial_wqkv(name, module))


class Llama(LayoutIndependentInit, Llama3Model):
    """Llama with the first weights of the AMO paper."""

    @dataclass(kw_only=True, slots=True)
    class Config(Llama3Model.Config):
        """torchtitan's."""


class Qwen(LayoutIndependentInit, Qwen3Model):
    """Qwen3 with the first weights of the AMO paper."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        """torchtitan's."""


def _initial_weight(name: str, shape: torch.Size | tuple[int, ...]) -> torch.Tensor:
    """The whole weight of module ``name``, from a seed of its own.

    DTensor draws one sequence for a tensor of the world on accelerators alone. On CPU each rank
    would draw the same numbers for its own shard, and a matrix would repeat its rows.
    """
    # Names as torchtitan 0.2.2 had them: runs that started there can be repeated.
    name = clean_name(name).replace("qkv_linear.", "").replace("lm_head", "output")
    text = f"{torch.initial_seed()} {name}.weight".encode()
    seed = int.from_bytes(hashlib.sha256(text).digest()[:8], "little", signed=True)
    return torch.empty(shape).normal_(0.0, INIT_STD, generator=torch.Generator().manual_seed(seed))


def _initial_wqkv(name: str, module: FusedQKVLinear) -> torch.Tensor:
    """Initial weight of queries, keys and values in the order of the fused one: by KV head."""
    rows, dim = module.wqkv.weight.shape
    head_dim, num_kv = module.head_dim, rows // (module.r_dim * module.head_dim)
    parts = [
        _initial_weight(f"{name}.{part}", (num_kv * heads * head_dim, dim)).view(num_kv, -1, dim)
        for part, heads in (("wq", module.heads_per_kv), ("wk", 1), ("wv", 1))
    ]
    return torch.cat(parts, dim=1).view(rows, dim)


def _copy_into(weight: torch.Tensor, whole: torch.Tensor) -> None:
    if isinstance(weight, DTensor):
        mesh, placements = weight.device_mesh, weight.placements
        whole = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    weight.copy_(whole)
