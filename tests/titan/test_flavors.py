"""The eight models of the AMO paper: shapes, counts, split."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torchtitan.models.llama3 import llama3_configs
from torchtitan.models.qwen3 import qwen3_configs

from amo_dist.config import OPERATOR_TYPES
from amo_dist.operators.groups import param_groups
from torchtitan_ext.plugin import models

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "model_specs.json").read_text())


def family(flavor: str) -> str:
    return "qwen3" if flavor.startswith("Qwen3") else "llama3"


def config_of(flavor: str) -> Any:
    return models.spec(models.Model(name=family(flavor), flavor=flavor)).model


def test_no_flavor_shadows_one_of_torchtitan() -> None:
    assert not models.FLAVORS["llama3"].keys() & llama3_configs.keys()
    assert not models.FLAVORS["qwen3"].keys() & qwen3_configs.keys()


@pytest.mark.parametrize("flavor", GOLDEN)
def test_shapes_and_shares_of_the_optimizers_are_the_papers(flavor: str) -> None:
    with torch.device("meta"):
        model: Any = config_of(flavor).build()
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
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert len(model.layers) == golden["layers"]
    for name, shape in {
        "attention.qkv_linear.wq": (golden["heads"] * head_dim, golden["dim"]),
        "attention.qkv_linear.wk": (golden["kv_heads"] * head_dim, golden["dim"]),
        "feed_forward.w1": (golden["ffn_dim"], golden["dim"]),
        "feed_forward.w2": (golden["dim"], golden["ffn_dim"]),
    }.items():
        assert shapes[f"layers.0.{name}.weight"] == shape, name
    is_qwen = family(flavor) == "qwen3"
    assert shapes["tok_embeddings.weight"] == (151936 if is_qwen else 128256, golden["dim"])
    assert ("lm_head.weight" in shapes) == (not is_qwen)  # tied: the head has no name of its own
    assert ("layers.0.attention.q_norm.weight" in shapes) == is_qwen
    layers = config_of(flavor).layers
    assert {layer.attention.rope.theta for layer in layers} == {1e6 if is_qwen else 5e5}
    assert {layer.ffn_norm.eps for layer in layers} == {1e-6 if is_qwen else 1e-5}
