"""Faults through torchtitan: after each, the newest complete checkpoint, and the same run."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import signal
from pathlib import Path

import pytest

from tests.integration.titan_ranks import Job, Run, Server, assert_same_end
from tests.titan.test_checkpoints import flip
from torchtitan_ext.tools.report.data import load

NUM_STEPS = 10
OPTIONS = (
    *("--checkpoint.enable", "--checkpoint.interval=2", "--checkpoint.keep_latest_k=0"),
    "--checkpoint.no-last_save_model_only",
    "--metrics.callbacks=tests.integration.own_callbacks.Recorder",
)


@pytest.fixture(scope="module")
def reference(titan: Server, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that nothing happened to."""
    run = titan.run(Job(2, str(tmp_path_factory.mktemp("reference")), OPTIONS))
    assert run.complete() == [2, 4, 6, 8, 10]
    calls = []
    for step in range(1, NUM_STEPS + 1):
        methods = ["before_step", *["on_plan"] * (step == 4), "after_step", "log_metrics"]
        calls += [[method, step] for method in (*methods, *["on_save"] * (step % 2 == 0))]
    for rank in range(2):
        lines = (run.folder / f"calls{rank}.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == calls
    for record in run.records():
        assert record["slowest_optimizer_seconds_per_step"] >= record["optimizer_seconds_per_step"]
        assert {record["slowest_optimizer_rank"], record["slowest_data_rank"]} <= {0, 1}
    assert [record["tenfold_step"] for record in run.records()] == [*range(10, 101, 10)]
    # The console of a brief run: the plan once, and nothing of what only a log needs.
    assert run.output().count("beside the uniform schedule:\n") == 1
    for rank in range(2):
        assert "device mesh" in (run.folder / f"log_rank{rank}.txt").read_text()
    assert "device mesh" not in run.output()
    assert "nothing was trained" not in run.output()
    return run


def test_a_run_that_is_complete_says_so(titan: Server, reference: Run, tmp_path: Path) -> None:
    shutil.copytree(reference.folder, tmp_path, dirs_exist_ok=True)
    for file in tmp_path.glob("rank*.txt"):
        file.unlink()
    run = titan.run(Job(2, str(tmp_path), OPTIONS))
    assert run.output().count(f"of {NUM_STEPS}): nothing was trained; a larger training.steps") == 1
    assert run.losses() == reference.losses()


def test_a_signal_to_one_rank_saves_and_stops_all(
    titan: Server, reference: Run, tmp_path: Path
) -> None:
    job = Job(2, str(tmp_path), OPTIONS)
    exits = titan.wait(titan.start(dataclasses.replace(job, die_at=(1, 5, "SIGTERM"))), 120)
    assert exits == [75, 75]
    run = Run(tmp_path, 2)
    last = max(run.losses())
    # All are asked before a step, and answer after it; a thread sees the signal.
    assert last in (6, 7)
    assert run.complete()[-1] == last
    for rank in range(2):
        calls = (tmp_path / f"calls{rank}.jsonl").read_text().splitlines()
        assert json.loads(calls[-1]) == ["on_stop", last]
    assert_same_end(titan.run(job), reference, NUM_STEPS)


def test_checkpoints_cut_or_damaged_are_skipped(
    titan: Server, reference: Run, tmp_path: Path
) -> None:
    job = Job(2, str(tmp_path), OPTIONS)
    exits = titan.wait(titan.start(dataclasses.replace(job, die_at=(0, 6, "before_metadata"))), 60)
    assert exits[0] == -signal.SIGKILL
    # The other one does not wait for it: its connection is gone.
    assert exits[1] not in (0, None)
    run = Run(tmp_path, 2)
    assert run.complete() == [2, 4]
    assert list((tmp_path / "checkpoint" / "step-6").iterdir())
    newest = tmp_path / "checkpoint" / "step-4"
    flip(newest / "__1_0.distcp")
    stops = dataclasses.replace(job, arguments=(*OPTIONS, "--checkpoint.damaged=error"))
    assert titan.wait(titan.start(stops), timeout=60) == [2, 2]
    run = titan.run(job)
    assert f"{newest} is damaged: __1_0.distcp has other bytes than were written" in run.output()
    assert f"training resumes at step 3 of {NUM_STEPS}\n" in run.output()
    assert_same_end(run, reference, NUM_STEPS)
    spans = load(run.folder).spans("phase")
    assert spans == [("observation", 1, 4), ("transition", 5, 7), ("locked", 8, NUM_STEPS)]


@pytest.mark.slow
def test_a_run_goes_on_from_an_object_store(titan: Server, reference: Run, tmp_path: Path) -> None:
    store = f"--checkpoint.folder=file://{tmp_path}/store/checkpoint"
    job = Job(2, str(tmp_path / "run"), (*OPTIONS, store, "--checkpoint.async_mode=async"))
    exits = titan.wait(titan.start(dataclasses.replace(job, die_at=(0, 7, "SIGKILL"))), 60)
    assert exits[0] == -signal.SIGKILL
    assert not (tmp_path / "run" / "checkpoint").exists()
    run = titan.run(job)
    # The save of step 6, in a thread, may have been cut short.
    assert re.search(rf"training resumes at step [57] of {NUM_STEPS}\n", run.output())
    (tmp_path / "run" / "checkpoint").symlink_to(tmp_path / "store" / "checkpoint")
    assert_same_end(run, reference, NUM_STEPS)


@pytest.mark.slow
def test_a_full_disk_costs_the_steps_since(titan: Server, reference: Run, tmp_path: Path) -> None:
    job = Job(2, str(tmp_path), (*OPTIONS, "--checkpoint.async_mode=async"))
    fails = dataclasses.replace(job, die_at=(1, 6, "disk_full"))
    exits = titan.wait(titan.start(fails), timeout=60)
    assert exits == [1, 1]
    run = Run(tmp_path, 2)
    for rank in range(2):
        told = f"error (rank {rank}): the checkpoint of step 6 could not be written to {tmp_path}"
        (line,) = [line for line in run.output().splitlines() if line.startswith(told)]
        assert line.endswith("(on rank 1); step 4 is the newest complete one")
    assert run.complete() == [2, 4]
    run = titan.run(job)  # somebody has made room
    assert_same_end(run, reference, NUM_STEPS)


@pytest.mark.slow
def test_a_stalled_rank_ends_the_others(titan: Server, reference: Run, tmp_path: Path) -> None:
    """In a resumed run, where the timeout of the start would otherwise be left in force."""
    shutil.copytree(reference.folder, tmp_path, dirs_exist_ok=True)
    for step in (6, 8, 10):
        shutil.rmtree(tmp_path / "checkpoint" / f"step-{step}")
    timeouts = ("--comm.train_timeout_seconds=5", "--comm.init_timeout_seconds=600")
    job = Job(2, str(tmp_path), (*OPTIONS, *timeouts), die_at=(1, 7, "SIGSTOP"))
    first, stalled = titan.start(job)
    # Far beyond the 5 seconds, for busy machines, and far below the 600.
    (status,) = titan.wait([first], timeout=120)
    assert titan.wait([stalled], timeout=0) == [None]
    assert status not in (None, 0)
    output = Run(tmp_path, 2).output()
    assert "training resumes at step 5" in output
    assert "Timed out waiting 5000ms" in output


@pytest.mark.slow
def test_training_goes_on_from_weights_alone(titan: Server, tmp_path: Path) -> None:
    """From a checkpoint that holds weights only, and from Hugging Face's format: the same bits."""
    options = ("--model.name=qwen3", "--model.flavor=tiny", "--checkpoint.enable")  # a tied head
    exports = {"dcp": "--checkpoint.last_save_model_only", "hf": "--checkpoint.last_save_in_hf"}
    starts = {"dcp": (), "hf": ("--checkpoint.initial_load_in_hf",)}
    losses = {}
    for key, export in exports.items():
        folder = tmp_path / key
        first = titan.run(Job(2, str(folder), (*options, export)))
        weights = folder / "checkpoint" / f"step-{NUM_STEPS}"
        assert bool(list(weights.glob("*.safetensors"))) == (key == "hf")
        load = f"--checkpoint.initial_load_path={weights}"
        second = titan.run(Job(2, str(tmp_path / f"{key}2"), (*options, load, *starts[key])))
        # A new run, from its first step and first text, with better weights.
        phases = [record["phase"] for record in second.traces()[0]]
        assert phases[:5] == [*["observation"] * 4, "transition"]
        assert second.losses()[1] < first.losses()[1] - 0.5
        losses[key] = second.losses()
    assert losses["hf"] == losses["dcp"]
