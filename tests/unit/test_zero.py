"""What a part is called is what it does: an oracle of models' own code, which knows no names.

With values at zero an attention gives zero; with queries at zero its output does not depend on the
keys; with what is called up at zero an MLP gives zero. So a part that is cut at the wrong rows
fails. The models are small, with random weights and without biases.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amo_dist.operators.parts import cut
from amo_dist.operators.tree import Place
from amo_dist.operators.views import Fused
from tests.census import decided

# Sizes by the names that configurations have for them.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embed_dim"), 64),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(
        ("intermediate_size", "n_inner", "ffn_hidden_size", "moe_intermediate_size"), 96
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 48,
    "head_dim": 16,
    "vocab_size": 128,
    "use_cache": False,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 1,
}
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ("GPT2LMHeadModel", "OpenAIGPTLMHeadModel", "GPTNeoXForCausalLM")),
    *((name, {}) for name in ("GPTNeoXJapaneseForCausalLM", "BloomForCausalLM")),
    *((name, {}) for name in ("PersimmonForCausalLM", "Phi3ForCausalLM", "MptForCausalLM")),
    *((name, {}) for name in ("ModernBertForMaskedLM", "GlmForCausalLM", "Glm4ForCausalLM")),
    *((name, {}) for name in ("MiniMaxForCausalLM", "GraniteMoeHybridForCausalLM")),
    *((name, {}) for name in ("ImageGPTForCausalImageModeling", "DebertaForMaskedLM")),
    *((name, {}) for name in ("VitDetModel", "FalconForCausalLM", "MoshiForCausalLM")),
    ("ModernBertDecoderForCausalLM", {}),
    ("GPTBigCodeForCausalLM", {"multi_query": True}),
    ("GPTBigCodeForCausalLM", {"multi_query": False}),
    ("FalconForCausalLM", {"new_decoder_architecture": True}),
    *((name, {}) for name in ("tiny_vit_5m_224", "vit_tiny_patch16_224", "gcvit_xxtiny")),
    *((name, {}) for name in ("swin_tiny_patch4_window7_224", "xcit_nano_12_p16_224")),
    *((name, {}) for name in ("eva02_tiny_patch14_224", "beit_base_patch16_224")),
    *((name, {}) for name in ("gmixer_24_224", "mambaout_femto", "davit_tiny", "nest_tiny")),
    *((name, {}) for name in ("coat_tiny", "volo_d1_224", "twins_svt_small", "cait_xxs24_224")),
    *((name, {}) for name in ("levit_128s", "hiera_tiny_224", "pvt_v2_b0", "efficientformer_l1")),
    *((name, {}) for name in ("maxvit_tiny_tf_224", "gmlp_s16_224", "tnt_s_patch16_224")),
    ("vit_giant_patch14_dinov2", {"img_size": 518, "depth": 2}),
    ("maxxvit_rmlp_nano_rw_256", {"img_size": 256}),
    ("crossvit_9_240", {"img_size": 240}),
    ("mobilevit_s", {"img_size": 256}),
]
"""Class of transformers, or model of timm, and options beside `SIZES`."""


def build(name: str, options: dict[str, Any]) -> tuple[nn.Module, dict[str, Tensor]]:
    """A small model, and an input."""
    torch.manual_seed(0)
    if name.islower():
        size = options.pop("img_size", 224)
        model = pytest.importorskip("timm").create_model(name, **options)
        return model.eval(), {"x": torch.randn(1, 3, size, size)}
    kind = getattr(importlib.import_module("transformers"), name)
    default = kind.config_class()
    fields = [f for f in SIZES if hasattr(default, f)]
    computed = {f for f in fields if isinstance(getattr(type(default), f, None), property)}
    own = {field: SIZES[field] for field in fields if field not in computed} | options
    model = kind(kind.config_class(**own)).eval()
    if model.main_input_name == "pixel_values":
        size = model.config.image_size
        return model, {"pixel_values": torch.randn(1, 3, size, size)}
    return model, {"input_ids": torch.randint(2, 120, (1, 7))}


def parts_of(place: Place) -> tuple[tuple[str, int], ...]:
    """Types and sizes of what a parameter packs; empty for one matrix."""
    is_packed = isinstance(place.target, Fused) and not place.target.heads
    return place.target.parts if is_packed else ()  # type: ignore[union-attr]


def set_parts(places: Iterable[Place], ends: tuple[str, ...], value: float) -> bool:
    """Fill the matrices whose types end so with noise of a size; whether there were any."""
    was_set = False
    for place in places:
        for view in cut(place, False):
            for box in view.boxes or (tuple((0, size) for size in place.shape),):
                if view.operator_type.endswith(ends):
                    part = place.parameter[tuple(slice(*interval) for interval in box)]
                    part.copy_(torch.randn_like(part) * value)
                    was_set = True
    return was_set


def readers_of(place: Place) -> list[nn.Module]:
    """The linear modules that may read what the parts of a parameter make."""
    node = place.node.parent if place.is_linear else place.node
    while node and len(node.linears) < 2:
        node = node.parent
    others = [other for other in (node.linears if node else []) if other is not place]
    outputs = [other for other in others if other.kind == "attn_o"] or others
    sizes = {size for _, size in parts_of(place)}
    return [other.node.module for other in outputs if other.inputs in sizes]


@torch.no_grad()
def check(model: nn.Module, inputs: dict[str, Tensor]) -> int:
    """Check the first packed parameter of each kind; the number of checks."""
    places = decided(model)
    for place in places:
        if "bias" in place.field:
            place.parameter.zero_()
    kinds: dict[tuple[str, ...], Place] = {}
    for place in places:
        if (types := dict(parts_of(place))) and len(place.shape) == 2:
            kinds.setdefault((*types, str(place.shape)), place)
    return sum(check_parts(model, inputs, place) for place in kinds.values())


def check_parts(model: nn.Module, inputs: dict[str, Tensor], place: Place) -> int:
    """Check one parameter; the number of checks."""
    reads: list[Tensor] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, args: reads.append(args[0].clone()))
        for module in readers_of(place)
    ]

    def run() -> list[Tensor]:
        reads.clear()
        model(**inputs)
        return list(reads)

    kept, before, checks = place.parameter.clone(), run(), 0
    assert before, f"{place.name}: no reader ran"
    assert all(read.abs().max() > 0 for read in before)
    last = "_v" if any(kind.endswith("_v") for kind, _ in parts_of(place)) else "_up"
    if set_parts([place], (last,), 0.0):
        assert all(read.abs().max() == 0 for read in run()), f"{place.name}: {last}"
        checks += 1
    place.parameter.copy_(kept)
    if set_parts([place], ("attn_q",), 0.0):
        with_keys = run()
        set_parts([place], ("attn_k",), 1.0)
        for one, other in zip(with_keys, run(), strict=True):
            # Sums of a softmax's equal weights.
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        checks += 1
    place.parameter.copy_(kept)
    for hook in hooks:
        hook.remove()
    return checks


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), CASES)
def test_parts_do_what_they_are_called(name: str, options: dict[str, Any]) -> None:
    assert check(*build(name, dict(options))) > 0


def test_the_oracle_knows_a_wrong_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirds of heads that alternate are no queries, keys and values."""
    model, inputs = build("GPTNeoXForCausalLM", {})
    assert check(model, inputs) > 0
    monkeypatch.setattr("amo_dist.operators.parts._IN_TURN", ())
    with pytest.raises(AssertionError, match="query_key_value"):
        check(model, inputs)
