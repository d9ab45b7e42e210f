"""Tracking in a training run: the same weights as without it, and a log that resumes cleanly."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.amo_paper.static_schedule import read_pool
from tests.integration.titan_ranks import Job, Run, Server, assert_same_end
from torchtitan_ext.tools.export import find_source

NUM_STEPS = 8
OPTIONS = (
    f"--training.steps={NUM_STEPS}",
    # Momentum travels in float32 when it is measured, and must be narrowed as in other steps.
    "--optimizer.muon.ns_dtype=bfloat16",
    *("--checkpoint.enable", "--checkpoint.interval=4", "--checkpoint.keep_latest_k=0"),
    "--checkpoint.no-last_save_model_only",
)
TRACKED = ("--geometry.enable", "--geometry.interval=3")

pytestmark = pytest.mark.slow


def job(folder: Path, *options: str) -> Job:
    return Job(2, str(folder), (*OPTIONS, *options))


def log(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folder / "geometry.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def tracked(titan: Server, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return titan.run(job(tmp_path_factory.mktemp("tracked"), *TRACKED))


def test_a_tracked_run_ends_with_the_same_bits(tracked: Run, titan: Server, tmp_path: Path) -> None:
    plain = titan.run(job(tmp_path))
    assert not (tmp_path / "geometry.jsonl").exists()
    assert_same_end(tracked, plain, NUM_STEPS)


def test_the_log_holds_every_matrix_and_feeds_the_static_schedules(tracked: Run) -> None:
    records = log(tracked)
    assert len(records) == 2 * 14  # steps 3 and 6; two layers of seven matrices
    assert {record["step"] for record in records} == {3, 6}
    assert {record["layer"] for record in records} == {0, 1}
    assert {record["model"] for record in records} == {"Llama-3.1-tiny"}
    pool = read_pool([tracked.folder / "geometry.jsonl"])
    assert pool.families == ("Llama-3.1",)
    assert sum(map(len, pool.ell_by_type.values())) + pool.num_invalid == 28
    metrics = tracked.records()
    assert metrics[-1]["geometry_seconds"] > 0
    assert [r["step"] for r in metrics if r["observe_seconds"] is not None] == [2, 4]
    source = find_source(tracked.folder / "checkpoint" / f"step-{NUM_STEPS}")
    assert (source.model.name, source.model.flavor, source.optimizer) == ("llama3", "tiny", "AMO")


def test_a_finished_run_says_that_nothing_was_trained(
    tracked: Run, titan: Server, tmp_path: Path
) -> None:
    folder = tmp_path / "finished"
    shutil.copytree(tracked.folder, folder, ignore=shutil.ignore_patterns("rank*.txt"))
    names = ("metrics.jsonl", "geometry.jsonl", "run.json")
    before = {name: (folder / name).read_bytes() for name in names}
    run = titan.run(job(folder, "--geometry.enable", "--training.gc_freq=9"))
    told = f"the run in {folder} is complete (its checkpoint is of step 8 of 8)"
    assert (
        run.output()
        .splitlines()
        .count(f"{told}: nothing was trained; a larger training.steps goes on")
        == 1
    )
    assert {name: (folder / name).read_bytes() for name in names} == before


def test_a_resumed_run_drops_what_lies_beyond_its_checkpoint(
    tracked: Run, titan: Server, tmp_path: Path
) -> None:
    folder = tmp_path / "resumed"
    shutil.copytree(tracked.folder, folder)
    shutil.rmtree(folder / "checkpoint" / f"step-{NUM_STEPS}")
    with (folder / "geometry.jsonl").open("a") as file:
        file.write('{"step": 6, "cut short by a k')
    # From step 4 on: step 6 is measured again.
    resumed = titan.run(job(folder, *TRACKED, "--training.gc_freq=7"))
    assert log(resumed) == log(tracked)
    config = json.loads((folder / "run.json").read_text())
    assert config["training"]["gc_freq"] == 7  # of the latest start
