"""Running, gathering and evaluating experiments."""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
from pathlib import Path
from unittest import mock

import pytest

from amo_dist.config import OPERATOR_TYPES, AMOConfig
from amo_dist.schedule.planning import plan_allocation
from benchmarks.amo_paper import experiments, gather, runner
from benchmarks.amo_paper.__main__ import main
from benchmarks.amo_paper.catalog import EXPERIMENTS, Experiment
from benchmarks.amo_paper.resolve import ROOT, Job, Place, resolve

PAPER = Place()


def amo(*arguments: str) -> int:
    return main(list(arguments))


@pytest.mark.parametrize(
    ("experiment", "model", "start"),
    [
        ("cost", "Qwen3-1.7B", "sbatch --nodes=4 launch/train.slurm configs/qwen3_1.7b.toml "),
        ("main", "Qwen3-0.6B", "sbatch --nodes=2 launch/train.slurm configs/qwen3_0.6b.toml "),
        ("geometry", "Qwen3-70M", "amo train configs/qwen3_70m.toml "),
    ],
)
def test_commands_ask_for_the_nodes_of_the_run(
    experiment: str, model: str, start: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert amo("show", experiment, "--model", model) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith(start) for line in lines)
    assert all(line.endswith(" --ranks 6") for line in lines if line.startswith("amo train"))
    assert amo("show", "cost", "--small") == 0  # a stand-in, on whatever there is
    assert "\namo train configs/quickstart.toml" in capsys.readouterr().out


def test_a_task_of_the_array_starts_its_run(tmp_path: Path) -> None:
    """The script is run, with a stand-in for what starts training and for the other commands."""
    jobs = [resolve(run, PAPER) for run in EXPERIMENTS["static-coefficients"].runs()]
    scripts = runner.slurm_scripts("static-coefficients", jobs, ["--x=a b"], tmp_path / "s.slurm")
    (text,) = scripts.values()
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "train.slurm").write_text('printf "%s\\n" "$@"\n')
    (tmp_path / "python").write_text('#!/bin/sh\necho "made $*"\n')
    (tmp_path / "python").chmod(0o755)
    for index, job in itertools.islice(enumerate(jobs), 0, None, 9):
        environment = {
            "PATH": f"{tmp_path}:/usr/bin:/bin",
            "SLURM_SUBMIT_DIR": str(tmp_path),
            "SLURM_ARRAY_TASK_ID": str(index),
        }
        done = subprocess.run(
            ["bash", "-s"], input=text, text=True, capture_output=True, env=environment, check=True
        )
        made = [line for line in done.stdout.splitlines() if line.startswith("made")]
        assert len(made) == len(job.prepare)
        rest = done.stdout.splitlines()[len(made) :]
        assert rest == [str(job.config), *job.arguments(), "--x=a b"]


def write_run(job: Job, losses: dict[int, float], **fields: object) -> None:
    folder = ROOT / job.folder
    folder.mkdir(parents=True)
    lines = [
        json.dumps({"step": step, "loss": loss, "num_tokens": step * 1000, **fields})
        for step, loss in losses.items()
    ]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def save(job: Job, last_file: str = ".metadata") -> None:
    """What the last save of a run leaves, its last file with it."""
    job.checkpoint(None).mkdir(parents=True)
    (job.checkpoint(None) / last_file).touch()


def small(name: str, tmp_path: Path) -> tuple[Experiment, Place]:
    parser = argparse.ArgumentParser()
    experiments.add_commands(parser.add_subparsers())
    arguments = ["gather", name, "--small", "--out", str(tmp_path)]
    return experiments.selection(parser.parse_args(arguments))


def cells(line: str) -> str:
    """What stands in a row of a table."""
    return " ".join(line.replace("|", " ").split())


def test_gathering_of_scores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiment, place = small("budget-control", tmp_path)
    jobs = experiments.jobs_of(experiment, place)
    write_run(jobs[0], {60: 3.0, 120: 2.5}, num_steps_by_type={"attn_q": 3, "attn_k": 4})
    write_run(jobs[2], {1: 5.5})
    save(jobs[0])
    ells = dict.fromkeys(OPERATOR_TYPES, 1e-3)
    plan = plan_allocation(AMOConfig.paper(budget_ratio=0.8), ells)
    (ROOT / jobs[0].folder / "plan.json").write_text(plan.to_json())
    record = {"model": "m", "optimizer": "o", "tasks": {"sciq": 80.0, "arc_easy": 60.0}}
    jobs[0].results(None).write_text(json.dumps(record))
    found = gather.gather(experiment, place)
    assert [row.loss for row in found] == [2.5, None, None, None, None]
    assert [row.step_reached for row in found] == [120, 0, 1, 0, 0]
    assert [row.ns_steps for row in found] == [28, None, None, None, None]
    assert [row.average for row in found] == [70.0, None, None, None, None]
    assert [runner.is_done(job) for job in jobs] == [True, False, False, False, False]
    lines = gather.table(experiment, found).splitlines()
    assert cells(lines[2]) == "step loss NS steps AE SciQ Avg"
    assert cells(lines[4]) == "0.8 120 2.5000 28 60.00 80.00 70.00"
    output = tmp_path / "r.json"
    arguments = ("--small", "--out", str(tmp_path), "--results", str(output), "--json")
    assert amo("gather", "budget-control", *arguments) == 0
    assert len(json.loads(capsys.readouterr().out)) == 5
    (written,) = json.loads(output.read_text())
    assert (written["model"], written["optimizer"]) == ("quickstart", "0.8")


def test_gathering_of_costs(tmp_path: Path) -> None:
    experiment, place = small("cost", tmp_path)
    job = experiments.jobs_of(experiment, place)[0]
    folder = ROOT / job.folder
    folder.mkdir(parents=True)
    rows = [  # the first span compiles; the others last 10 and 30 steps
        {"step": 1, "seconds_per_step": 99.0, "optimizer_seconds_per_step": 9.0},
        {
            "step": 11,
            "seconds_per_step": 1.0,
            "optimizer_seconds_per_step": 0.1,
            "phase": "observation",
            "optimizer": {"optimizer/observe_seconds": 0.4},
            "observe_seconds": 0.5,
            "peak_memory_bytes": 2**30,
        },
        {
            "step": 41,
            "seconds_per_step": 2.0,
            "optimizer_seconds_per_step": 0.3,
            "phase": "locked",
            "optimizer": {"optimizer/observe_seconds": 0.4},
            "observe_seconds": None,
            "peak_memory_bytes": 3 * 2**29,
        },
    ]
    lines = [json.dumps({"loss": 1.0, "num_tokens": r["step"] * 1e6, **r}) for r in rows]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, ""]))
    found = gather.gather(experiment, place)
    # (10 x 1 + 30 x 2) / 40 and so on; rounding of these sums.
    assert list(found[0].cost.values()) == [
        pytest.approx(1.75),
        pytest.approx(250.0),
        pytest.approx(1 / 1.75),
        1.5,
        0.5,
        *(None, None, None, None),  # a record of ten steps, and one of two phases
    ]
    lines = gather.table(experiment, found).splitlines()
    assert cells(lines[2]) == "AdamW 1.75 250 0.5714 1.5 0.5 - - - -"
    assert set(found[1].cost.values()) == {None}


def test_complete_runs_are_not_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment, place = small("budget-control", tmp_path)
    jobs = experiments.jobs_of(experiment, place)
    for job in (jobs[0], jobs[3]):
        write_run(job, {120: 2.0})
        save(job)
    started: list[str] = []
    monkeypatch.setattr(runner, "check", lambda jobs, extra: None)
    monkeypatch.setattr(
        runner, "_train", lambda job, extra, ranks: started.append(job.run.name) or 0
    )
    assert runner.run_jobs(jobs, [], 2) == 0
    assert started == [job.run.name for job in jobs if job not in (jobs[0], jobs[3])]
    assert capsys.readouterr().out.count("complete, 120 steps") == 2


def test_a_run_is_complete_once_its_last_step_is_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment, place = small("budget-control", tmp_path)
    jobs = experiments.jobs_of(experiment, place)
    for job in jobs[:4]:
        write_run(job, {120: 2.0})
    save(jobs[1], "__0_0.distcp")  # killed within the save
    save(jobs[2], "model.safetensors.index.json")  # the last one may be of weights
    config = {"checkpoint": {"enable": False, "load_only": False}}
    (jobs[3].folder / "run.json").write_text(json.dumps(config))
    assert [runner.is_done(job) for job in jobs] == [False, False, True, True, False]
    assert amo("show", "budget-control", "--small", "--out", str(tmp_path)) == 0
    headings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("#")]
    states = ["at step 120", "at step 120", "complete", "complete", "not started"]
    assert [line.rpartition(", ")[2] for line in headings] == states


def test_the_first_failure_ends_the_sequence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment, place = small("budget-control", tmp_path)
    statuses = iter([0, 7])
    monkeypatch.setattr(runner, "check", lambda jobs, extra: None)
    monkeypatch.setattr(runner, "_train", lambda job, extra, ranks: next(statuses))
    assert runner.run_jobs(experiments.jobs_of(experiment, place), [], 2) == 7
    assert "budget-0.9: failed (status 7)" in capsys.readouterr().err


def test_a_stopped_run_ends_the_sequence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment, place = small("budget-control", tmp_path)
    process = mock.Mock(**{"wait.return_value": 75, "poll.return_value": 75})
    started = mock.Mock(return_value=process)
    monkeypatch.setattr(runner, "check", lambda jobs, extra: None)
    monkeypatch.setattr(subprocess, "Popen", started)
    assert runner.run_jobs(experiments.jobs_of(experiment, place), [], 2) == 75
    started.assert_called_once()
    assert "stopped; the same command goes on (status 75)" in capsys.readouterr().err


def test_wrong_options_show_before_any_run(tmp_path: Path) -> None:
    experiment, place = small("budget-control", tmp_path)
    jobs = experiments.jobs_of(experiment, place)
    with pytest.raises(ValueError, match=r"budget-0\.8: training\.steps: found 20"):
        runner.run_jobs(jobs, ["--training.steps=20"], 2)
