"""Callbacks that runs of the tests name by import path."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchtitan_ext.plugin.callbacks import Callback


class Recorder(Callback):
    """Writes each call to ``calls<rank>.jsonl`` of the run's folder."""

    def record(self, method: str, step: int) -> None:
        path = Path(self.trainer.config.dump_folder, f"calls{dist.get_rank()}.jsonl")
        with path.open("a") as file:
            file.write(json.dumps([method, step]) + "\n")

    def before_step(self, step: int) -> None:
        self.record("before_step", step)

    def after_step(self, step: int) -> None:
        self.record("after_step", step)

    def on_plan(self, step: int, plan: Mapping[str, Any]) -> None:
        assert plan["allocation"]
        self.record("on_plan", step)

    def on_save(self, step: int) -> None:
        self.record("on_save", step)

    def on_stop(self, step: int) -> None:
        self.record("on_stop", step)

    def log_metrics(self, step: int, record: Mapping[str, Any]) -> Mapping[str, float]:
        assert record["loss"] > 0
        self.record("log_metrics", step)
        return {"tenfold_step": 10 * step}
