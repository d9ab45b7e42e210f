"""What an override makes of a config of torchtitan."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import re
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchtitan.components.metrics as titan_metrics
import torchtitan.components.quantization.float8 as quantization
from torch import nn
from torch._inductor import config as inductor
from torchtitan.components.optimizer import default_adamw
from torchtitan.config.override import _REGISTRY, OverrideConfig, apply_overrides, parse_cli_imports
from torchtitan.models.common.linear import Linear
from torchtitan.models.llama3 import config_registry as registry
from torchtitan.models.qwen3 import config_registry as registry_of_qwen3
from torchtitan.protocols.module import Module
from torchtitan.trainer import Trainer

from amo_dist import param_groups
from torchtitan_ext.config import settings
from torchtitan_ext.plugin import machine
from torchtitan_ext.plugin.checkpoints import CheckpointManager
from torchtitan_ext.plugin.metrics import MetricsProcessor
from torchtitan_ext.plugin.optimizers import OptimizersContainer

CONFIGS = Path(__file__).parents[2] / "configs"


def applied(config: Any, *tokens: str) -> Any:
    apply_overrides(OverrideConfig(imports=parse_cli_imports([*tokens])), config)
    return config


def llama3_debugmodel(**optimizer: Any) -> Any:
    config = registry.llama3_debugmodel()
    config.parallelism.spmd_backend = machine.spmd_backend()
    if optimizer:
        config.optimizer = default_adamw(**optimizer)
    return config


def test_one_option_brings_optimizer_metrics_and_checkpoints() -> None:
    stock = llama3_debugmodel(lr=3e-4, weight_decay=0.02, betas=(0.8, 0.9))
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
    assert config.training.disable_cuda_graphs  # nothing here was tried under them
    assert hasattr(Trainer.train, "stock")  # a signal stops it
    assert hasattr(dist, "set_timeout")  # which torchtitan calls after the first step


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


@pytest.mark.parametrize(
    ("token", "field"),
    [
        ('amo={"observe_til": 1}', "observe_til"),
        ('amo={"lr": "1e-3"}', "lr"),
        ('amo={"observe_until": 2.5}', r"amo\.observe_until"),
        ('amo={"no_decay": [1]}', "no_decay"),
        ('amo={"callbacks": "notes.Notes"}', "callbacks"),
        ('amo={"stop_seconds": 0}', "stop_seconds"),
        ('amo={"name": "AdamW"}', "name"),
        ('muon={"name": "AMO"}', "name"),
    ],
)
def test_fields_are_checked(token: str, field: str) -> None:
    with pytest.raises(ValueError, match=rf"^override\.imports: {field}: found "):
        applied(llama3_debugmodel(), f"torchtitan_ext.override.{token}")


def test_groups_of_the_config_stay() -> None:
    config = registry_of_qwen3.qwen3_debugmodel_moe_param_groups()
    config.parallelism.spmd_backend = machine.spmd_backend()
    section = applied(config, "torchtitan_ext.override.amo").optimizer
    rates = section.lr_multipliers

    def rate(name: str) -> float:
        return section.lr * next((f for p, f in rates.items() if re.fullmatch(p, name)), 1.0)

    names = ["layers.0.moe.router.gate.weight", "layers.0.attention.wo.weight"]
    for name in names:
        group = next(g for g in config_groups() if re.search(g.pattern, name))
        assert rate(name) == pytest.approx(group.optimizer_kwargs["lr"])
    assert rate(names[0]) < rate(names[1])


def config_groups() -> Any:
    return registry_of_qwen3.qwen3_debugmodel_moe_param_groups().optimizer.param_groups


def test_groups_that_cannot_stay_are_an_error() -> None:
    config = llama3_debugmodel(lr=1e-3, weight_decay=0.1)
    other = copy.deepcopy(config.optimizer.param_groups[0])
    other.pattern, other.optimizer_kwargs["eps"] = "norm", 1e-3
    config.optimizer.param_groups.insert(0, other)
    with pytest.raises(ValueError, match=r"found eps = 0.001 and 1e-08 in the config's param_g"):
        applied(config, "torchtitan_ext.override.amo")


def test_a_toml_run_refuses_an_override_that_would_do_nothing() -> None:
    config = settings.parse([f"--job.config_file={CONFIGS / 'quickstart.toml'}"])
    with pytest.raises(ValueError, match=r"override\.muon with an \[optimizer\] of this project"):
        applied(config, 'torchtitan_ext.override.muon={"lr": 0.5}')


def test_own_fields_of_other_sections_are_arguments_too() -> None:
    fields = '{"stop_seconds": 30, "damaged": "error", "callbacks": ["notes.Notes"]}'
    config = applied(llama3_debugmodel(), f"torchtitan_ext.override.muon={fields}")
    assert (config.checkpoint.stop_seconds, config.checkpoint.damaged) == (30, "error")
    assert config.metrics.callbacks == ["notes.Notes"]
    assert config.optimizer.name == "Muon"


class Theirs(titan_metrics.MetricsProcessor):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(titan_metrics.MetricsProcessor.Config):
        extra: int = 1


class Derived(MetricsProcessor):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        extra: int = 1


def test_a_section_of_the_users_is_kept_or_named() -> None:
    config = llama3_debugmodel()
    config.metrics = Derived.Config(extra=3)
    assert applied(config, "torchtitan_ext.override.amo").metrics == Derived.Config(extra=3)
    config = llama3_debugmodel()
    config.metrics = Theirs.Config()
    with pytest.raises(ValueError, match=r"found .*Theirs.Config, expected .* or a subclass of"):
        applied(config, "torchtitan_ext.override.amo")


@pytest.mark.skipif(not machine.IS_OLD, reason="PyTorch takes every backend since 2.14")
def test_a_backend_that_fails_later_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected --parallelism.spmd_backend partial_dtensor"):
        applied(registry.llama3_debugmodel(), "torchtitan_ext.override.amo")


def test_float8_leaves_routers() -> None:
    fqns = _REGISTRY["torchtitan_ext.override.float8"]
    assert not fqns.matches("layers.3.moe.router.gate")
    for name in ("attention.wo", "feed_forward.w1", "attention.o_gate", "moe.shared_experts.w2"):
        assert fqns.matches(f"layers.3.{name}")
    assert not fqns.matches("lm_head")
    with pytest.raises(ValueError, match=r"found filter_fqns = \['router'\]"):
        applied(llama3_debugmodel(), 'torchtitan_ext.override.float8={"filter_fqns": ["router"]}')


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
