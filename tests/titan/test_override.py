"""What an override makes of a config of torchtitan."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchtitan.components.quantization.float8 as quantization
from torch import nn
from torch._inductor import config as inductor
from torchtitan.components.optimizer import default_adamw
from torchtitan.config.override import OverrideConfig, apply_overrides, parse_cli_imports
from torchtitan.models.common.linear import Linear
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.models.qwen3.config_registry import qwen3_debugmodel_moe_param_groups
from torchtitan.protocols.module import Module

from amo_dist import param_groups
from torchtitan_ext.config import settings
from torchtitan_ext.plugin.checkpoints import CheckpointManager
from torchtitan_ext.plugin.metrics import MetricsProcessor
from torchtitan_ext.plugin.optimizers import OptimizersContainer

CONFIGS = Path(__file__).parents[2] / "configs"


def applied(config: Any, *tokens: str) -> Any:
    apply_overrides(OverrideConfig(imports=parse_cli_imports([*tokens])), config)
    return config


def test_one_option_brings_optimizer_metrics_and_checkpoints() -> None:
    stock = llama3_debugmodel()
    stock.optimizer = default_adamw(lr=3e-4, weight_decay=0.02, betas=(0.8, 0.9))
    config = applied(stock, 'torchtitan_ext.override.amo={"eps": 1e-6, "observe_until": 300}')
    section = config.optimizer
    assert type(section) is OptimizersContainer.Config
    assert (section.name, section.amo.observe_until) == ("AMO", 300)
    # What nobody gave is that of the config's AdamW.
    assert (section.lr, section.weight_decay, section.eps) == (3e-4, 0.02, 1e-6)
    assert (section.beta1, section.beta2) == (0.8, 0.9)
    assert type(config.metrics) is MetricsProcessor.Config
    assert config.metrics.log_freq == 1
    assert type(config.checkpoint) is CheckpointManager.Config
    assert (config.checkpoint.interval, config.checkpoint.last_save_model_only) == (10, False)


@pytest.mark.parametrize(
    ("token", "name", "schedule"),
    [
        ("muon", "Muon", ""),
        ('muon={"schedule": "pe"}', "Muon", "pe"),
        ('muon={"name": "AdaMuon"}', "AdaMuon", ""),
        ("normuon", "NorMuon", ""),
    ],
)
def test_others_of_the_family_have_their_names(token: str, name: str, schedule: str) -> None:
    section = applied(llama3_debugmodel(), f"torchtitan_ext.override.{token}").optimizer
    assert section.name == name
    assert section.muon.schedule in (schedule, "kj")


def test_what_cannot_be_told_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"found the field 'observe_til'; did you mean 'obs"):
        applied(llama3_debugmodel(), 'torchtitan_ext.override.amo={"observe_til": 1}')
    with pytest.raises(ValueError, match=r"found lr = 0.0001 and 0.0008 in the config's param_g"):
        applied(qwen3_debugmodel_moe_param_groups(), "torchtitan_ext.override.amo")


class _Float8Linear(nn.Linear, Module):
    """In the place of torchao's, which is not installed with the project."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        _torchao_config: object = None

    def __init__(self, config: Any) -> None:
        super().__init__(config.in_features, config.out_features, bias=config.bias)


@inductor.patch(emulate_precision_casts=False)  # torchtitan's converter sets it for good
def test_float8_takes_the_blocks_and_leaves_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = SimpleNamespace(from_recipe_name=lambda name: name)
    torchao = types.ModuleType("torchao.float8")
    torchao.Float8LinearConfig = recipes  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchao", types.ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.float8", torchao)
    monkeypatch.setattr(quantization, "Float8Linear", _Float8Linear)
    monkeypatch.setattr(quantization, "has_cuda_capability", lambda *_: True)
    config = settings.parse([f"--job.config_file={CONFIGS / 'quickstart.toml'}"])
    config.override.imports = ["torchtitan_ext.override.float8"]
    assert config.model_spec is not None
    with torch.device("meta"):
        plain = config.model_spec.model.build()
        apply_overrides(config.override, config)
        model = config.model_spec.model.build()
    found = {name for name, one in model.named_modules() if isinstance(one, _Float8Linear)}
    expected = {name for name, one in plain.named_modules() if isinstance(one, nn.Linear)}
    assert found == expected - {"lm_head"}
    shapes = [[(n, p.shape) for n, p in one.named_parameters()] for one in (plain, model)]
    assert shapes[0] == shapes[1]
    assert len(param_groups(model)) == len(param_groups(plain))


def test_float8_without_torchao_says_so() -> None:
    if importlib.util.find_spec("torchao") is not None:
        pytest.skip("torchao is installed")
    with pytest.raises(ImportError, match="torchao is not installed"):
        applied(llama3_debugmodel(), "torchtitan_ext.override.float8")
