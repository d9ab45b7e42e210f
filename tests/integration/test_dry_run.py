"""Every config takes one real step of rank 0, in a simulated world of the paper's size.

Nothing of CUDA or NCCL is tried here: collectives of the fake backend return at once, and what
other ranks would send is missing. Depth, vocabulary and sequence are cut for time, and the global
batch to one sequence a rank; the shape of every matrix, the layout and the schedule stay.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.examples import ROOT, run
from tests.integration.titan_ranks import CONFIG, Job, Server
from torchtitan_ext.config import settings

CONFIGS = sorted((ROOT / "configs").glob("*.toml"))
OVERRIDES = (
    "--comm.mode=fake_backend",
    "--training.steps=1",
    "--training.seq_len=64",
    "--training.local_batch_size=1",
    "--training.global_batch_size=-1",
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


@pytest.mark.slow
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_one_step_of_every_config(titan: Server, tmp_path: Path, path: Path) -> None:
    match = re.search(r"--world (\d+)$", path.read_text(), re.MULTILINE)
    world_size = int(match[1]) if match else 2
    settings.parse([f"--job.config_file={path}"], world_size)  # its own batch fits
    job = Job(1, str(tmp_path), OVERRIDES, str(path), fake_world=world_size)
    (record,) = titan.run(job).records()
    assert record["step"] == 1
    if match is None:
        return
    # About log(4096) = 8.3 for weights that know nothing; a wrong scale of the first weights, or of
    # the loss, is far off. No closer: the rows of other ranks are missing.
    assert 7 < record["loss"] < 11
    assert 0 < record["grad_norm"] < 1e3
    is_adamw = path.stem.endswith("_adamw_paper")
    assert record["phase"] == ("" if is_adamw else "observation")
    # Every type has its steps: names of compiled modules are those of plain ones.
    assert [*record["num_steps_by_type"].values()] == ([] if is_adamw else [5] * 7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "status", "error"),
    [
        ("--training.steps=20", 0, ""),
        # No check of fields alone knows the heads of the model.
        ("--parallelism.tensor_parallel_degree=8", 1, "tensor_parallel_degree (8) must divide"),
    ],
)
def test_the_preflight_trains_as_one_of_many_ranks(option: str, status: int, error: str) -> None:
    words = ["preflight", CONFIG, "--world", "8", "--dry-run", option, "--json"]
    done = run([sys.executable, "-m", "torchtitan_ext", *words], ROOT, warnings="default")
    assert done.returncode == status, done.stderr
    report = json.loads(done.stdout)
    assert [line for line in report["errors"] if error not in line] == []
    assert (report["dry run"] is None) == bool(status)
    if not status:
        assert 3 < report["dry run"]["loss"] < 8  # about log(320) = 5.8 at the start
        assert report["dry run"]["sent_bytes"] > 0
