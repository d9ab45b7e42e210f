"""Configs of torchtitan as they are, but for what a CPU lacks: their data, attention, reductions.

Data, tokenizer and the model's attention are those of ``configs/debug_llama3.toml``.
"""

from __future__ import annotations

from typing import Any

from tests.integration.titan_ranks import CONFIG
from torchtitan_ext import config_registry
from torchtitan_ext.config import settings
from torchtitan_ext.plugin import models


def _on_cpu(module: str, config: str, flavor: str) -> Any:
    found = getattr(config_registry, f"{module}.{config}")()
    ours = settings.parse([f"--job.config_file={CONFIG}"])
    found.model_spec = models.spec(models.Model(name=module, flavor=flavor))
    found.tokenizer, found.dataloader = ours.tokenizer, ours.dataloader
    found.debug.enable_structured_logging = False
    return found


def llama3_debugmodel() -> Any:
    return _on_cpu("llama3", "llama3_debugmodel", "cut")


def qwen3_moe_debug() -> Any:
    return _on_cpu("qwen3", "qwen3_moe_debug", "cut_moe")
