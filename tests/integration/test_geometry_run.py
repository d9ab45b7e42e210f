"""Tracking in a training run: the same weights as without it, and a log that resumes cleanly."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own modules warn while torchtitan imports them
    import torchtitan_ext.plugin.trainer  # noqa: F401

from torchtitan_ext.paper.static_schedule import read_pool
from torchtitan_ext.tools.export import find_source

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "quickstart.toml"
NUM_STEPS = 8
OPTIONS = (
    *("--model.flavor", "tiny", "--training.steps", str(NUM_STEPS)),
    *("--training.seq_len", "64", "--training.local_batch_size", "2"),
    *("--training.global_batch_size", "4"),
    *("--optimizer.amo.observe_every", "2", "--optimizer.amo.observe_until", "4"),
    *("--optimizer.amo.transition_steps", "2", "--lr_scheduler.warmup_steps", "2"),
    # Momentum travels in float32 when it is measured, and must be narrowed as in other steps.
    *("--optimizer.amo.ns_dtype", "bfloat16"),
    *("--metrics.log_freq", "1", "--metrics.no-enable_tensorboard"),
    *("--checkpoint.interval", "4", "--checkpoint.keep_latest_k", "0"),
)
TRACKED = ("--geometry.enable", "--geometry.interval", "3")

pytestmark = pytest.mark.slow


def train(folder: Path, *options: str) -> str:
    """What the ranks print."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "AMO_DEVICE": "cpu"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [
        "--nproc-per-node",
        "2",
        "-m",
        "torchtitan_ext.train",
        f"--job.config_file={CONFIG}",
    ]
    done = subprocess.run(
        [*command, "--dump_folder", str(folder), *OPTIONS, *options],
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def final_state(folder: Path) -> dict[str, Any]:
    path = folder / "whole.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a checkpoint read outside a process group
        dcp_to_torch_save(str(folder / "checkpoint" / f"step-{NUM_STEPS}"), str(path))
    return torch.load(path, weights_only=False)


def assert_equal(found: Any, expected: Any, where: str = "") -> int:
    """Every tensor alike, bit for bit; returns how many there were."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        return sum(assert_equal(found[k], v, f"{where}/{k}") for k, v in expected.items())
    if torch.is_tensor(expected):
        assert torch.equal(found, expected), where
        return 1
    return 0


def log(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "geometry.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "tracked"
    train(folder, *TRACKED)
    return folder


def test_a_tracked_run_ends_with_the_same_bits(tracked: Path, tmp_path: Path) -> None:
    train(tmp_path / "plain")
    assert not (tmp_path / "plain" / "geometry.jsonl").exists()
    assert assert_equal(final_state(tracked), final_state(tmp_path / "plain")) > 50


def test_the_log_holds_every_matrix_and_feeds_the_static_schedules(tracked: Path) -> None:
    records = log(tracked)
    assert len(records) == 2 * 14  # steps 3 and 6; two layers of seven matrices
    assert {record["step"] for record in records} == {3, 6}
    assert {record["layer"] for record in records} == {0, 1}
    assert {record["model"] for record in records} == {"Llama-3.1-tiny"}
    pool = read_pool([tracked / "geometry.jsonl"])
    assert pool.families == ("Llama-3.1",)
    assert sum(map(len, pool.ell_by_type.values())) + pool.num_invalid == 28
    metrics = [json.loads(line) for line in (tracked / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["geometry_seconds"] > 0
    assert [r["step"] for r in metrics if r["observe_seconds"] is not None] == [2, 4]


def test_the_folder_says_how_it_was_trained(tracked: Path) -> None:
    source = find_source(tracked / "checkpoint" / f"step-{NUM_STEPS}")
    assert (source.name, source.flavor, source.optimizer) == ("llama3", "tiny", "AMO")


def test_a_finished_run_says_that_nothing_was_trained(tracked: Path) -> None:
    names = ("metrics.jsonl", "geometry.jsonl", "run.json")
    before = {name: (tracked / name).read_bytes() for name in names}
    told = train(tracked, "--geometry.enable", "--training.gc_freq", "9")
    assert told.splitlines() == [
        f"the run in {tracked} is complete (its checkpoint is of step 8 of 8): nothing was trained"
    ]
    assert {name: (tracked / name).read_bytes() for name in names} == before


def test_a_resumed_run_drops_what_lies_beyond_its_checkpoint(tracked: Path, tmp_path: Path) -> None:
    folder = tmp_path / "resumed"
    shutil.copytree(tracked, folder)
    shutil.rmtree(folder / "checkpoint" / f"step-{NUM_STEPS}")
    with (folder / "geometry.jsonl").open("a") as file:
        file.write('{"step": 6, "cut short by a k')
    # From step 4 on: step 6 is measured again.
    train(folder, *TRACKED, "--training.gc_freq", "7")
    assert log(folder) == log(tracked)
    config = json.loads((folder / "run.json").read_text())
    assert config["training"]["gc_freq"] == 7  # of the latest start
