"""State of all forked ranks: torchtitan's modules, smaller models, and one text."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from torchtitan.models import deepseek_v3, llama3

from tests.distributed.harness import compute_in_float32
from torchtitan_ext.data import corpus, loader, tokenizers
from torchtitan_ext.plugin import trainer  # noqa: F401


def first_layers(stock: Any, **options: Any) -> Any:
    """A debug model of torchtitan with fewer layers, ``cut``: width is kept."""
    config = stock(**options)
    return dataclasses.replace(config, layers=config.layers[:2])


compute_in_float32()
for flavors in (llama3.llama3_configs, deepseek_v3.deepseekv3_configs):
    flavors["cut"] = functools.partial(first_layers, flavors["debugmodel"])
text = corpus.standard_library(tokenizers.ByteTokenizer())
loader.standard_library = lambda _: text  # type: ignore[attr-defined]
