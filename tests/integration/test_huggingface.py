"""Models of Hugging Face's transformers, from random weights: names, training, checkpoints."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from amo_dist import AMO, AMOConfig, param_groups

pytestmark = pytest.mark.slow

DENSE = Counter(("attn_q", "attn_k", "attn_v", "attn_o", "mlp_gate", "mlp_up", "mlp_down"))
GPT2 = Counter(("attn_q", "attn_k", "attn_v", "attn_o", "mlp_up", "mlp_down"))
NUM_LAYERS, VOCAB = 2, 64
# Grouped-query attention, and no width divides another.
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
GPT2_SIZES = {"vocab_size": VOCAB, "n_embd": 24, "n_layer": NUM_LAYERS, "n_head": 4}
GPT2_SIZES |= {"bos_token_id": 0, "eos_token_id": 1}
CONFIG = AMOConfig(observe_until=4, observe_every=2, sample_size=2, transition_steps=2)


def make_model(family: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    is_gpt2 = family == "gpt2"
    config = transformers.GPT2Config(**GPT2_SIZES) if is_gpt2 else transformers.LlamaConfig(**SIZES)
    return transformers.AutoModelForCausalLM.from_config(config)


def tokens(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (4, 16), generator=generator)


def train(model: nn.Module, optimizer: AMO, steps: int, batch: Tensor) -> list[float]:
    """Losses of ``steps`` steps on one batch."""
    losses = []
    for _ in range(steps):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def types_by_name(groups: list[dict[str, Any]]) -> dict[str, tuple[str, ...]]:
    views = {name: v for group in groups for name, v in group.get("matrix_views", {}).items()}
    return {name: tuple(view.operator_type for view in v) for name, v in views.items()}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_family_is_classified_and_trains(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model(family)
    groups = param_groups(model, report=True)
    types = types_by_name(groups)
    expected = GPT2 if family == "gpt2" else DENSE
    found = Counter(kind for kinds in types.values() for kind in kinds)
    assert found == Counter(dict.fromkeys(expected, NUM_LAYERS))
    # Every matrix of a block is among them, and nothing else.
    blocks = {
        n for n, p in model.named_parameters() if p.ndim == 2 and (".layers." in n or ".h." in n)
    }
    assert set(types) == blocks
    report = capsys.readouterr().out
    assert all(name in report for name, _ in model.named_parameters())

    optimizer = AMO(groups, lr=1e-2, config=CONFIG)
    losses = train(model, optimizer, 8, tokens(1))
    assert optimizer.phase == "locked"
    # One batch over and over: anything that learns gets far below the first loss.
    assert losses[-1] < losses[0] - 0.5


class LoRALinear(nn.Module):
    """A frozen layer and its low-rank update, under the names that PEFT gives them."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        down = nn.Linear(base.in_features, rank, bias=False)
        up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(up.weight)
        self.lora_A = nn.ModuleDict({"default": down})
        self.lora_B = nn.ModuleDict({"default": up})

    def forward(self, x: Tensor) -> Tensor:
        update: Tensor = self.lora_B["default"](self.lora_A["default"](x))
        return self.base_layer(x) + update


def with_lora(model: nn.Module) -> nn.Module:
    for layer in model.model.layers:
        layer.self_attn.q_proj = LoRALinear(layer.self_attn.q_proj, rank=3)
        layer.self_attn.v_proj = LoRALinear(layer.self_attn.v_proj, rank=3)
    return model


def test_lora_beside_trained_matrices() -> None:
    model = with_lora(make_model("llama"))
    model.model.embed_tokens.requires_grad_(False)
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    groups = param_groups(model)
    types = Counter(kind for kinds in types_by_name(groups).values() for kind in kinds)
    assert types == Counter({t: NUM_LAYERS for t in DENSE if t not in ("attn_q", "attn_v")})
    adamw = {name for name, _ in groups[1]["params"]}
    assert {n for n, _ in model.named_parameters() if "lora_" in n} <= adamw

    losses = train(model, AMO(groups, lr=1e-2, config=CONFIG), 8, tokens(2))
    assert losses[-1] < losses[0] - 0.3
    after = dict(model.named_parameters())
    assert len(frozen) == 2 * NUM_LAYERS + 1
    assert all(torch.equal(after[name], value) for name, value in frozen.items())
    assert after["model.layers.0.self_attn.q_proj.lora_B.default.weight"].any()


def test_lora_alone_needs_a_pattern() -> None:
    model = with_lora(make_model("llama").requires_grad_(False))
    groups = param_groups(model)
    assert [group["algorithm"] for group in groups] == ["adamw"]
    # Not in silence: who asks for AMO and has nothing to orthogonalize made a mistake.
    with pytest.raises(ValueError, match="found no matrix among 8 parameters"):
        train(model, AMO(groups, lr=1e-2, config=CONFIG), 1, tokens(3))

    groups = param_groups(model, patterns={r".*lora_A.*": "lora_a", r".*lora_B.*": "lora_b"})
    assert [group["algorithm"] for group in groups] == ["muon"]
    optimizer = AMO(groups, lr=1e-2, config=CONFIG)
    losses = train(model, optimizer, 8, tokens(3))
    assert losses[-1] < losses[0]
    assert set(optimizer.schedules_by_type(8)) == {"lora_a", "lora_b"}


def test_compiled_and_checkpointed_models_keep_names_and_bits() -> None:
    plain = make_model("llama")
    wrapped = make_model("llama")
    for index, layer in enumerate(wrapped.model.layers):
        wrapped.model.layers[index] = checkpoint_wrapper(layer)
    compiled = torch.compile(wrapped, backend="eager")
    raw = {name for name, _ in compiled.named_parameters()}
    assert all(name.startswith("_orig_mod.") for name in raw)
    assert any("_checkpoint_wrapped_module." in name for name in raw)
    groups, expected = param_groups(compiled), param_groups(plain)
    assert [[name for name, _ in g["params"]] for g in groups] == [
        [name for name, _ in g["params"]] for g in expected
    ]
    assert types_by_name(groups) == types_by_name(expected)
    # Recomputed activations are the same numbers; so are gradients and all that follows.
    batch = tokens(5)
    losses = train(wrapped, AMO(groups, lr=1e-2, config=CONFIG), 7, batch)
    assert losses == train(plain, AMO(expected, lr=1e-2, config=CONFIG), 7, batch)
