"""torchtitan's own config under an override: the lock, a kill, and the numbers of a TOML file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from tests.integration.titan_ranks import Job, Run, Server, assert_same_end
from torchtitan_ext.runs.run_files import read_plan

pytestmark = pytest.mark.slow

AMO = {"lr": 3e-3, "observe_every": 1, "observe_until": 2, "transition_steps": 2}
STEPS = 8
SHORT = (
    *(f"--training.steps={STEPS}", "--training.seq_len=64", "--training.local_batch_size=1"),
    *("--training.global_batch_size=4", "--training.mixed_precision_param=float32"),
    *("--debug.seed=42", "--metrics.log_freq=1"),
    *("--checkpoint.enable", "--checkpoint.interval=3", "--checkpoint.no-last_save_model_only"),
)
"""AMO observes until step 2, and is locked from step 4 on: a kill after step 3 is on the way."""


def test_a_stock_config_trains_as_the_file_does_past_a_kill(titan: Server, tmp_path: Path) -> None:
    override = ("--override.imports", f"torchtitan_ext.override.amo={json.dumps(AMO)}")
    stock = Job(2, str(tmp_path / "stock"), (*SHORT, *override), stock="llama3_debugmodel")
    found = titan.run(stock)
    assert [record["phase"] for record in found.traces()[0]] == [
        *("observation", "observation", "transition"),
        *["locked"] * (STEPS - 3),
    ]
    assert read_plan(found.folder) is not None

    prefix = {key: "optimizer" if key == "lr" else "optimizer.amo" for key in AMO}
    options = [f"--{prefix[key]}.{key}={value}" for key, value in AMO.items()]
    file = (
        *(*SHORT, *options, "--model.flavor=cut"),
        *("--loss.num_chunks=8", "--lr_scheduler.warmup_steps=2"),
        *("--lr_scheduler.decay_ratio=0.8", "--lr_scheduler.decay_type=linear"),
        *("--lr_scheduler.min_lr_factor=0", "--activation_checkpoint.mode=selective"),
    )
    assert titan.run(Job(2, str(tmp_path / "file"), file)).losses() == found.losses()

    folder = tmp_path / "killed"
    killed = dataclasses.replace(stock, folder=str(folder))
    titan.wait(titan.start(dataclasses.replace(killed, die_at=(1, 4, "SIGKILL"))), timeout=120)
    assert Run(folder, 2).complete() == [3]
    assert_same_end(titan.run(killed), found, STEPS)
