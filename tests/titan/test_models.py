"""Models of a config: their first weights and attention, and torchtitan on CPU."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.decoder import Decoder

from torchtitan_ext.plugin import models
from torchtitan_ext.plugin.activations import Activations


def build(name: str, flavor: str, *, fuse_qkv: bool = False) -> Decoder:
    spec = models.spec(models.Model(name=name, flavor=flavor, fuse_qkv=fuse_qkv))
    return cast(Decoder, spec.model.build())


def start(model: Decoder, seed: int = 1) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    with torch.no_grad():
        model.init_weights()
    return dict(model.state_dict())


def test_first_weights_are_those_of_earlier_runs() -> None:
    # Drawn from names that torchtitan had before 0.3.0; a change would end all comparisons.
    found = start(build("llama3", "tiny"), seed=42)
    for name, expected in {
        "layers.1.attention.qkv_linear.wk.weight": [0.0260078069, 0.0215195976, 0.0084796632],
        "lm_head.weight": [0.0062356102, 0.0019128791, 0.0041444905],
    }.items():
        assert found[name][0, :3].tolist() == pytest.approx(expected, rel=1e-6), name


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_first_weights_are_the_papers(name: str) -> None:
    model = build(name, "tiny")
    start(model)
    for key, parameter in model.named_parameters():
        if "norm" in key:
            assert torch.equal(parameter, torch.ones_like(parameter)), key
            continue
        count = parameter.numel()
        # Six standard errors: of the mean, 0.02 / sqrt(n); of the deviation, 0.02 / sqrt(2 n).
        assert abs(parameter.mean().item()) < 6 * 0.02 / count**0.5, key
        assert parameter.std().item() == pytest.approx(0.02, abs=6 * 0.02 / (2 * count) ** 0.5)


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_a_fused_projection_starts_as_three(name: str) -> None:
    apart, fused = build(name, "tiny"), build(name, "tiny", fuse_qkv=True)
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
