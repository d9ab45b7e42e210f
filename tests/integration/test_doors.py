"""The ways to start a training, which all train alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "configs/debug_llama3.toml"
DOORS = {
    "train": ("torchtitan_ext.train", "--job.config_file", CONFIG, "--dump_folder"),
    "amo": ("torchtitan_ext", "train", CONFIG, "--dump_folder"),
    "torchtitan": (
        *("torchtitan.train", "--module", "torchtitan_ext", "--config", "debug_llama3"),
        "--dump_folder",
    ),
}
OPTIONS = ("--training.steps=4", "--optimizer.amo.transition_steps=1", "--optimizer.allow_unlocked")


def losses(door: str, folder: Path) -> list[float]:
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    start: tuple[str, ...] = (*torchrun, *DOORS.get(door, ()))
    if door == "node":
        start = ("torchtitan_ext", "train", CONFIG, "--ranks", "2", "--dump_folder")
    done = subprocess.run(
        [sys.executable, "-m", *start, str(folder), *OPTIONS],
        env={**os.environ, "OMP_NUM_THREADS": "1", "AMO_DEVICE": "cpu", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_all_doors_train_alike(tmp_path: Path) -> None:
    found = {door: losses(door, tmp_path / door) for door in (*DOORS, "node")}
    assert len(found["train"]) == 4
    assert found["train"] == found["amo"] == found["torchtitan"] == found["node"]
