"""What an override makes of a config of torchtitan."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own modules warn while torchtitan imports them
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.config.override import OverrideConfig, apply_overrides, parse_cli_imports
    from torchtitan.models.llama3.config_registry import llama3_debugmodel
    from torchtitan.models.qwen3.config_registry import qwen3_debugmodel_moe_param_groups

    from torchtitan_ext.plugin.checkpoints import CheckpointManager
    from torchtitan_ext.plugin.metrics import MetricsProcessor
    from torchtitan_ext.plugin.optimizers import OptimizersContainer


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
