"""Every config takes one real step of rank 0, in a simulated world of the paper's size.

Nothing of CUDA or NCCL is tried here: collectives of the fake backend return at once, and what
other ranks would send is missing. Depth, vocabulary and sequence are cut for time, and the global
batch to one sequence a rank; the shape of every matrix, the layout and the schedule stay.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
BIG = sorted(
    path for path in CONFIGS.glob("*.toml") if path.stem.startswith(("qwen3_", "llama3.1_", "cpt_"))
)
SMALL = sorted({*CONFIGS.glob("*.toml")} - {*BIG})

# One process takes the step of one config after the other: the imports cost more than the step.
PROGRAM = """
import dataclasses, gc, json, os, sys, time, types
from torchtitan_ext.plugin import patches
patches.install()
import torch
import torchtitan.trainer
from torchtitan_ext import train
from torchtitan_ext.config import settings
from torchtitan_ext.plugin import models

# The first rank waits for the others at its end: two seconds a config.
torchtitan.trainer.time = types.SimpleNamespace(sleep=id, perf_counter=time.perf_counter)

for flavors in models.FLAVORS.values():
    for flavor, (shape, _) in list(flavors.items()):
        if "-" in flavor:
            flavors[flavor] = dataclasses.replace(shape, layers=1), 4096

for path, world_size, folder in json.loads(sys.argv[1]):
    # What `torchtitan_ext.train` does, but for the batch, which is only cut once it was checked.
    os.environ["NGPU"] = os.environ["WORLD_SIZE"] = str(world_size)
    arguments = [f"--job.config_file={path}", f"--dump_folder={folder}", *sys.argv[2:]]
    config = settings.parse(arguments)
    batch = config.training.local_batch_size * world_size
    assert config.training.global_batch_size in (-1, *range(batch, 10**6, batch))
    config.training.local_batch_size, config.training.global_batch_size = 1, -1
    train.train(config)
    print("DONE", json.dumps([os.path.basename(path), torch.distributed.is_initialized()]))
    gc.collect()
"""

OVERRIDES = (
    "--comm.mode=fake_backend",
    "--training.steps=1",
    "--training.seq_len=64",
    "--dataloader.dataset=stdlib",
    "--tokenizer.kind=byte",
    "--optimizer.allow_unlocked",
    "--checkpoint.no-enable",
    "--metrics.no-enable-tensorboard",
    "--metrics.log_freq=1",
    "--lr_scheduler.warmup_steps=1",
    "--optimizer.muon.ns_dtype=float32",  # several times as fast on a CPU
    "--compile.enable",
    "--compile.backend=eager",  # traced whole, without minutes of C++ for each model
    "--validator.dataloader.dataset=stdlib",
    "--validator.steps=1",
)


def world_of(path: Path) -> int:
    """The number of ranks that the comment of a config names."""
    match = re.search(r"--world (\d+)$", path.read_text(), re.MULTILINE)
    return int(match[1]) if match else 2


def dry_run(paths: list[Path], folder: Path) -> dict[str, dict[str, float]]:
    jobs = [[str(path), world_of(path), str(folder / path.stem)] for path in paths]
    environment = {
        **os.environ,
        "RANK": "0",
        "LOCAL_RANK": "0",
        "OMP_NUM_THREADS": "1",
        "AMO_DEVICE": "cpu",
        "PYTHONPATH": str(ROOT),
        "COVERAGE_PROCESS_CONFIG": "",  # measured, tracing takes twice as long
    }
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(jobs), *OVERRIDES],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    assert result.stdout.count("DONE") == len(paths)
    records = {}
    for path in paths:
        line, *validated = (folder / path.stem / "metrics.jsonl").read_text().splitlines()
        assert len(validated) <= 1  # of [validator], where a config has it
        records[path.stem] = json.loads(line)
    return records


def check(name: str, record: dict[str, float]) -> None:
    assert record["step"] == 1
    # About log(4096) = 8.3 for weights that know nothing; a wrong scale of the first weights, or of
    # the loss, is far off. No closer: the rows of other ranks are missing.
    assert 7 < record["loss"] < 11, name
    assert 0 < record["grad_norm"] < 1e3, name
    is_adamw = name.endswith("_adamw_paper")
    assert record["phase"] == ("" if is_adamw else "observation")
    # Every type has its steps: names of compiled modules are those of plain ones.
    assert [*record["num_steps_by_type"].values()] == ([] if is_adamw else [5] * 7)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "llama3.1"])
def test_one_step_of_every_config_of_the_paper(family: str, tmp_path: Path) -> None:
    paths = [path for path in BIG if family in path.stem]
    assert len(paths) == {"qwen3": 10, "llama3.1": 8}[family]
    for name, record in dry_run(paths, tmp_path).items():
        check(name, record)


@pytest.mark.slow
def test_one_step_of_the_small_configs(tmp_path: Path) -> None:
    records = dry_run(SMALL, tmp_path)
    assert {record["step"] for record in records.values()} == {1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "status", "error"),
    [
        ("--training.steps=20", 0, ""),
        # No check of fields alone knows the heads of the model.
        ("--parallelism.tensor_parallel_degree=8", 1, "tensor_parallel_degree (8) must divide"),
    ],
)
def test_the_preflight_trains_two_steps_as_one_of_many_ranks(
    option: str, status: int, error: str
) -> None:
    words = ["preflight", str(CONFIGS / "debug_llama3.toml"), "--world", "8", "--dry-run", option]
    done = subprocess.run(
        [sys.executable, "-m", "torchtitan_ext", *words, "--json"],
        env={**os.environ, "AMO_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stderr
    report = json.loads(done.stdout)
    assert [line for line in report["errors"] if error not in line] == []
    assert (report["dry run"] is None) == bool(status)
    assert status or 3 < report["dry run"]["loss"] < 8  # about log(320) = 5.8 at the start
