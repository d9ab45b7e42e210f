"""What an override makes of a config of torchtitan."""

from __future__ import annotations

import dataclasses
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


def test_groups_of_the_config_are_named_anew() -> None:
    config = registry_of_qwen3.qwen3_debugmodel_moe_param_groups()
    config.parallelism.spmd_backend = machine.spmd_backend()
    override = "torchtitan_ext.override.amo"
    with pytest.raises(ValueError, match=r"^override.imports: found 3 param_groups .*no_decay and"):
        applied(config, override)
    section = applied(config, f'{override}={{"no_decay": [".*embed.*"]}}').optimizer
    assert (section.lr, section.weight_decay, section.no_decay) == (8e-4, 0.1, (".*embed.*",))


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
