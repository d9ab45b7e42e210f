"""Models of a config: shapes, first weights, attention and documents, and torchtitan on CPU."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

from amo_dist.config import OPERATOR_TYPES
from amo_dist.operators.groups import param_groups
from tests.examples import ROOT
from torchtitan_ext.config import settings
from torchtitan_ext.data.loader import document_positions
from torchtitan_ext.data.tokenizers import ByteTokenizer
from torchtitan_ext.plugin import models, patches
from torchtitan_ext.plugin.sections import Activations

GOLDEN = json.loads((ROOT / "tests/golden/model_specs.json").read_text())
EOS = ByteTokenizer().eos_id


def build(name: str, flavor: str = "tiny", **fields: Any) -> Any:
    return models.spec(models.Model(name=name, flavor=flavor, **fields)).model.build()


def start(model: Any, seed: int = 1) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    with torch.no_grad():
        model.init_weights()
    return dict(model.state_dict())


def test_first_weights_are_those_of_earlier_runs() -> None:
    # Drawn from names that torchtitan had before 0.3.0; a change would end all comparisons.
    found = start(build("llama3"), seed=42)
    for name, expected in {
        "layers.1.attention.qkv_linear.wk.weight": [0.0260078069, 0.0215195976, 0.0084796632],
        "lm_head.weight": [0.0062356102, 0.0019128791, 0.0041444905],
    }.items():
        assert found[name][0, :3].tolist() == pytest.approx(expected, rel=1e-6), name


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_a_fused_projection_starts_as_three(name: str) -> None:
    apart, fused = build(name), build(name, fuse_qkv=True)
    expected, found = start(apart), start(fused)
    assert "layers.0.attention.qkv_linear.wqkv.weight" in dict(fused.named_parameters())
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
    tokens = torch.arange(12).view(2, 6)
    torch.testing.assert_close(fused(tokens), apart(tokens))


@pytest.mark.parametrize(
    ("mode", "policy"), [("none", Activations), ("full", FullAC), ("selective", SelectiveAC)]
)
def test_a_policy_of_activations_has_a_name(mode: Any, policy: type) -> None:
    assert type(Activations.Config(mode=mode).build(dump_folder="")) is policy


# ------------------------------------------------------------------ models of the paper


@pytest.mark.parametrize("flavor", GOLDEN)
def test_shapes_and_shares_of_the_optimizers_are_the_papers(flavor: str) -> None:
    is_qwen = flavor.startswith("Qwen3")
    with torch.device("meta"):
        model = build("qwen3" if is_qwen else "llama3", flavor)
    muon, adamw = param_groups(model)
    counts = [sum(p.numel() for _, p in group["params"]) for group in (muon, adamw)]
    golden = GOLDEN[flavor]
    # Printed with two decimals, some rounded and some cut: one unit of the last.
    assert counts[0] / 1e6 == pytest.approx(golden["muon_params_m"], abs=1e-2)
    assert counts[1] / 1e6 == pytest.approx(golden["adamw_params_m"], abs=1e-2)
    assert 100 * counts[0] / sum(counts) == pytest.approx(golden["muon_ratio_pct"], abs=1e-2)
    types = {views[0].operator_type for views in muon["matrix_views"].values()}
    assert types == set(OPERATOR_TYPES)
    head_dim = round(golden["q_ratio"] * golden["dim"] / golden["heads"])
    key = model.layers["0"].attention.qkv_linear.wk.weight
    assert key.shape == (golden["kv_heads"] * head_dim, golden["dim"])
    layers = model.config.layers
    assert {layer.attention.rope.theta for layer in layers} == {1e6 if is_qwen else 5e5}
    assert {layer.ffn_norm.eps for layer in layers} == {1e-6 if is_qwen else 1e-5}


# ------------------------------------------------------------------ documents


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ["llama3", "qwen3"])
@pytest.mark.parametrize("attention", ["sdpa", "flex"])
def test_a_document_sees_others_with_sdpa_alone(
    name: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMO_DEVICE", "cpu")
    patches.install()
    config = settings.parse(["--tokenizer.kind=byte", f"--model.attention={attention}"])
    assert config.dataloader.positions == (attention == "flex")
    model = build(name, attention=attention)
    start(model)

    def logits(tokens: torch.Tensor) -> Any:
        if attention == "sdpa":
            return model(tokens)
        positions = document_positions(tokens, EOS)
        masks = model.get_attention_masks(positions=positions)
        return model(tokens, positions=positions, attention_masks=masks)

    tokens = torch.randint(EOS, (1, 128))
    tokens[0, 60] = EOS
    other = tokens.clone()
    other[0, :60] = torch.randint(EOS, (60,))
    # Without a compiler: attention is the same, and slower.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        change = (logits(tokens) - logits(other))[0].abs().amax(dim=1)
    assert change[:61].min() > 0
    assert (change[61:].max() > 0) == (attention == "sdpa")
