"""A config of torchtitan as it is, but for what a CPU lacks: its data, attention, reductions.

Data, tokenizer and the model's attention are those of ``configs/debug_llama3.toml``.
"""

from __future__ import annotations

from typing import Any

from tests.integration.titan_ranks import CONFIG
from torchtitan_ext import config_registry
from torchtitan_ext.config import settings
from torchtitan_ext.plugin import models


def llama3_debugmodel() -> Any:
    config = getattr(config_registry, "llama3.llama3_debugmodel")()
    ours = settings.parse([f"--job.config_file={CONFIG}"])
    config.model_spec = models.spec(models.Model(name="llama3", flavor="cut"))
    config.tokenizer, config.dataloader = ours.tokenizer, ours.dataloader
    config.debug.enable_structured_logging = False
    return config
