"""The eight models of the AMO paper: shapes, counts, split, first weights."""

from __future__ import annotations

import dataclasses
import functools
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchtitan_ext
from amo_dist.config import OPERATOR_TYPES
from amo_dist.operators.groups import param_groups

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own modules warn while torchtitan imports them
    torchtitan_ext.register()

from torchtitan.models.llama3 import llama3_args
from torchtitan.models.qwen3 import qwen3_args
from torchtitan.protocols.train_spec import get_train_spec

from torchtitan_ext.plugin import models

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "model_specs.json").read_text())


def family(flavor: str) -> str:
    return "qwen3" if flavor.startswith("Qwen3") else "llama3"


@functools.cache
def meta_model(flavor: str) -> tuple[Any, nn.Module]:
    spec = get_train_spec(family(flavor))
    args = spec.model_args[flavor]
    with torch.device("meta"):
        return args, spec.model_cls(args)


def test_flavors_cover_the_paper() -> None:
    ours = {*models.flavors("llama3"), *models.flavors("qwen3")}
    assert set(GOLDEN) <= ours


def test_no_flavor_shadows_one_of_torchtitan() -> None:
    assert not set(models.flavors("llama3")) & set(llama3_args)
    assert not set(models.flavors("qwen3")) & set(qwen3_args)


@pytest.mark.parametrize("flavor", GOLDEN)
def test_parameter_counts_are_exact(flavor: str) -> None:
    _, model = meta_model(flavor)
    assert (
        sum(parameter.numel() for parameter in model.parameters())
        == (GOLDEN[flavor]["total_params"])
    )


@pytest.mark.parametrize("flavor", GOLDEN)
def test_the_optimizers_share_the_parameters_as_in_the_paper(flavor: str) -> None:
    _, model = meta_model(flavor)
    muon, adamw = param_groups(model)
    counts = [sum(p.numel() for _, p in group["params"]) for group in (muon, adamw)]
    golden = GOLDEN[flavor]
    # Printed with two decimals, some rounded and some cut: one unit of the last.
    assert counts[0] / 1e6 == pytest.approx(golden["muon_params_m"], abs=1e-2)
    assert counts[1] / 1e6 == pytest.approx(golden["adamw_params_m"], abs=1e-2)
    assert 100 * counts[0] / sum(counts) == pytest.approx(golden["muon_ratio_pct"], abs=1e-2)
    types = {views[0].operator_type for views in muon["matrix_views"].values()}
    assert types == set(OPERATOR_TYPES)


@pytest.mark.parametrize("flavor", GOLDEN)
def test_shapes_are_those_of_the_paper(flavor: str) -> None:
    args, model = meta_model(flavor)
    golden = GOLDEN[flavor]
    head_dim = round(golden["q_ratio"] * golden["dim"] / golden["heads"])
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert len(model.layers) == golden["layers"]
    for name, shape in {
        "attention.wq": (golden["heads"] * head_dim, golden["dim"]),
        "attention.wk": (golden["kv_heads"] * head_dim, golden["dim"]),
        "feed_forward.w1": (golden["ffn_dim"], golden["dim"]),
        "feed_forward.w2": (golden["dim"], golden["ffn_dim"]),
    }.items():
        assert shapes[f"layers.0.{name}.weight"] == shape, name
    is_qwen = family(flavor) == "qwen3"
    assert shapes["tok_embeddings.weight"] == (151936 if is_qwen else 128256, golden["dim"])
    assert ("output.weight" in shapes) == (not is_qwen)  # tied: the head has no name of its own
    assert ("layers.0.attention.q_norm.weight" in shapes) == is_qwen
    assert args.rope_theta == (1e6 if is_qwen else 5e5)


@pytest.mark.parametrize("flavor", [name for name in GOLDEN if name.startswith("Llama")])
def test_llama_scales_its_rotary_frequencies_as_llama_3_does(flavor: str) -> None:
    args, _ = meta_model(flavor)
    assert dataclasses.asdict(args.rope_scaling_args) == {
        "scaling_factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


@pytest.mark.parametrize("flavor", ["Qwen3-70M", "Llama-3.1-75M"])
def test_first_weights_are_the_papers(flavor: str) -> None:
    spec = get_train_spec(family(flavor))
    # Depth and vocabulary are cut, for time: neither enters the initialization of the paper.
    args = dataclasses.replace(spec.model_args[flavor], n_layers=2, vocab_size=2000)
    torch.manual_seed(0)
    model = spec.model_cls(args)
    with torch.no_grad():
        model.init_weights()
    drawn = 0
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
            continue
        drawn += 1
        count = parameter.numel()
        # Six standard errors: of the mean, 0.02 / sqrt(n); of the deviation, 0.02 / sqrt(2 n).
        assert abs(parameter.mean().item()) < 6 * 0.02 / count**0.5, name
        assert parameter.std().item() == pytest.approx(0.02, abs=6 * 0.02 / (2 * count) ** 0.5)
        # A truncated draw, torchtitan's habit, would stop at two or three deviations.
        assert parameter.abs().max().item() > 3.5 * 0.02, name
    assert drawn == 2 * 7 + (1 if family(flavor) == "qwen3" else 2)


def test_torchtitans_own_flavors_keep_their_weights() -> None:
    spec = get_train_spec("qwen3")
    args = dataclasses.replace(spec.model_args["0.6B"], n_layers=1, vocab_size=64)
    assert getattr(args, "init_std", None) is None
