"""Callbacks that runs of the tests name by import path."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchtitan_ext.plugin.callbacks import Callback

METHODS = ("before_step", "after_step", "on_plan", "on_save", "on_stop", "log_metrics")


class Recorder(Callback):
    """Writes each call to ``calls<rank>.jsonl`` of the run's folder."""

    def record(self, method: str, step: int, *_: Mapping[str, Any]) -> dict[str, float]:
        path = Path(self.trainer.config.dump_folder, f"calls{dist.get_rank()}.jsonl")
        with path.open("a") as file:
            file.write(json.dumps([method, step]) + "\n")
        return {"tenfold_step": 10 * step}


class Other(Callback):
    """Another class than the base."""


for _method in METHODS:
    setattr(Recorder, _method, functools.partialmethod(Recorder.record, _method))
