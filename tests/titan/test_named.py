"""Optimizers by name in the job config: TOML, command line, what each refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from amo_dist.optimizers.named import OPTIMIZER_NAMES
from tests.distributed import models
from torchtitan_ext.config import settings
from torchtitan_ext.runs import run_log

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.toml"


def parse(*args: str) -> Any:
    return settings.parse([f"--job.config_file={CONFIG}", *args])


def build(config: Any, root: nn.Module) -> Any:
    return config.optimizer.build(model_parts=[root])


@pytest.mark.parametrize("name", OPTIMIZER_NAMES)
def test_every_name_steps_and_reports(name: str) -> None:
    root = models.plain_model(models.shapes())
    container = build(parse("--optimizer.name", name), root)
    models.set_gradients(root, 0, 1)
    container.step()
    report = run_log.report(getattr(container, "optimizer", None))
    assert (report.phase == "") == (name == "AdamW")
    assert all(steps >= 4 for steps in report.num_steps_by_type.values())


def test_observation_alone_needs_no_lock() -> None:
    short = "--training.steps=50"
    with pytest.raises(ValueError, match="where the plan locks"):
        parse(short)
    assert parse(short, "--optimizer.amo.observe_only").optimizer.amo.observe_only
