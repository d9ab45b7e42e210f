"""What an override makes of a config of torchtitan."""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import Any

import pytest
import torch.distributed as dist
from torchtitan.components.checkpointer.base import BaseCheckpointManager
from torchtitan.components.optimizer import default_adamw
from torchtitan.config.override import _REGISTRY, OverrideConfig, apply_overrides, parse_cli_imports
from torchtitan.models.llama3 import config_registry as registry
from torchtitan.models.qwen3 import config_registry as registry_of_qwen3
from torchtitan.trainer import Trainer

from torchtitan_ext.plugin import machine
from torchtitan_ext.plugin.checkpoints import CheckpointManager
from torchtitan_ext.plugin.metrics import MetricsProcessor
from torchtitan_ext.plugin.optimizers import OptimizersContainer


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


def test_groups_of_the_config_stay() -> None:
    config = registry_of_qwen3.qwen3_debugmodel_moe_param_groups()
    groups = config.optimizer.param_groups
    config.parallelism.spmd_backend = machine.spmd_backend()
    section = applied(config, "torchtitan_ext.override.amo").optimizer
    rates = section.lr_multipliers

    def rate(name: str) -> float:
        return section.lr * next((f for p, f in rates.items() if re.fullmatch(p, name)), 1.0)

    names = ["layers.0.moe.router.gate.weight", "layers.0.attention.wo.weight"]
    for name in names:
        group = next(g for g in groups if re.search(g.pattern, name))
        assert rate(name) == pytest.approx(group.optimizer_kwargs["lr"])
    assert rate(names[0]) < rate(names[1])


def test_groups_that_cannot_stay_are_an_error() -> None:
    config = llama3_debugmodel(lr=1e-3, weight_decay=0.1)
    other = copy.deepcopy(config.optimizer.param_groups[0])
    other.pattern, other.optimizer_kwargs["eps"] = "norm", 1e-3
    config.optimizer.param_groups.insert(0, other)
    with pytest.raises(ValueError, match=r"found eps = 0.001 and 1e-08 in the config's param_g"):
        applied(config, "torchtitan_ext.override.amo")


@pytest.mark.parametrize(
    "pattern",
    ["norm", "(?i)NORM", "(?i)(?s)Norm$", "(?x) nor m  # of blocks", "^layers|output", r"\.\d\."],
)
def test_a_pattern_of_a_group_means_the_same_inside_another(pattern: str) -> None:
    config = llama3_debugmodel(lr=1e-3, weight_decay=0.1)
    base = config.optimizer.param_groups[0]
    for index, (one, rate) in enumerate({pattern: 2e-3, "(?i)W[QK]": 3e-3}.items()):
        group = copy.deepcopy(base)
        group.pattern, group.optimizer_kwargs["lr"] = one, rate
        config.optimizer.param_groups.insert(index, group)
    groups = config.optimizer.param_groups
    rates = applied(config, "torchtitan_ext.override.amo").optimizer.lr_multipliers
    for name in ("layers.0.attention_norm.weight", "norm.weight", "layers.1.attention.wq.weight"):
        group = next(g for g in groups if re.search(g.pattern, name))
        factor = next((f for p, f in rates.items() if re.fullmatch(p, name)), 1.0)
        assert 1e-3 * factor == pytest.approx(group.optimizer_kwargs["lr"])


@pytest.mark.parametrize("pattern", [r"(w)\1", "(?P<a>norm)", "(norm)?(?(1)x|y)"])
def test_a_pattern_that_means_another_inside_another_is_an_error(pattern: str) -> None:
    config = llama3_debugmodel(lr=1e-3, weight_decay=0.1)
    other = copy.deepcopy(config.optimizer.param_groups[0])
    other.pattern, other.optimizer_kwargs["lr"] = pattern, 3e-3
    config.optimizer.param_groups.insert(0, other)
    with pytest.raises(ValueError, match=r"^override.imports: found the pattern .* back ref"):
        applied(config, "torchtitan_ext.override.amo")


def test_fields_go_to_their_sections() -> None:
    fields = '"stop_seconds": 30, "callbacks": ["a.B"], "no_decay": true, "schedule": "pe"'
    config = applied(llama3_debugmodel(), f"torchtitan_ext.override.muon={{{fields}}}")
    assert config.checkpoint.stop_seconds == 30
    assert config.metrics.callbacks == ["a.B"]
    assert (config.optimizer.name, config.optimizer.no_decay) == ("Muon", True)
    assert config.optimizer.muon.schedule == "pe"
    token = 'torchtitan_ext.override.muon={"name": "AdaMuon"}'
    assert applied(llama3_debugmodel(), token).optimizer.name == "AdaMuon"


class Derived(MetricsProcessor):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        extra: int = 1


def test_a_section_of_the_users_is_kept_or_named() -> None:
    config = llama3_debugmodel()
    config.metrics = Derived.Config(extra=3)
    assert applied(config, "torchtitan_ext.override.amo").metrics == Derived.Config(extra=3)
    config = llama3_debugmodel()
    config.checkpoint = BaseCheckpointManager.Config()
    with pytest.raises(ValueError, match=r"found a section of .*BaseCheckpointManager"):
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
