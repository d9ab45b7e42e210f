"""Running, gathering and evaluating experiments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.amo_paper import evaluate, experiments, gather, runner
from benchmarks.amo_paper.__main__ import build_parser, main
from benchmarks.amo_paper.catalog import Experiment
from benchmarks.amo_paper.resolve import Job, Place
from benchmarks.amo_paper.results import PAPER_TASKS, check_examples


def small(name: str, tmp_path: Path) -> tuple[Experiment, Place, list[Job]]:
    arguments = ["gather", name, "--small", "--out", str(tmp_path)]
    experiment, place = experiments.selection(build_parser().parse_args(arguments))
    return experiment, place, experiments.jobs_of(experiment, place)


def write_run(job: Job, *records: dict[str, Any], saved: str = "") -> None:
    """Records of a run, and the last file of its last checkpoint."""
    job.folder.mkdir(parents=True)
    lines = [json.dumps({"loss": 2.0, "num_tokens": r["step"] * 1e6, **r}) for r in records]
    (job.folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    if saved:
        job.checkpoint(None).mkdir(parents=True)
        (job.checkpoint(None) / saved).touch()


def test_scores_are_gathered_into_the_papers_table(tmp_path: Path) -> None:
    experiment, place, jobs = small("budget-control", tmp_path)
    steps = {"attn_q": 3, "attn_k": 4}
    write_run(jobs[0], {"step": 120, "num_steps_by_type": steps}, saved=".metadata")
    write_run(jobs[2], {"step": 1})
    tasks = {"sciq": 80.0, "arc_easy": 60.0}
    record = {"model": "m", "optimizer": "o", "tasks": tasks}
    jobs[0].results(None).write_text(json.dumps(record))
    found = gather.gather(experiment, place)
    assert [row.loss for row in found] == [2.0, None, None, None, None]
    assert [row.step_reached for row in found] == [120, 0, 1, 0, 0]
    assert (found[0].ns_steps, found[0].average) == (7, 70.0)
    assert "60.00 |" in gather.table(experiment, found)


def test_costs_are_means_over_steps_but_the_first(tmp_path: Path) -> None:
    experiment, place, jobs = small("cost", tmp_path)
    seconds = ("seconds_per_step", "optimizer_seconds_per_step", "peak_memory_bytes")
    rows = [dict(zip(seconds, v, strict=True)) for v in ((99, 9, 1), (1, 0.1, 2**30), (2, 0.3, 1))]
    # The first span compiles; the others last 10 and 30 steps.
    write_run(jobs[0], *({"step": s} | row for s, row in zip((1, 11, 41), rows, strict=True)))
    cost = gather.gather(experiment, place)[0].cost
    expected = (1.75, 250.0, 1 / 1.75, 1.0)
    assert [*cost.values()][:4] == [pytest.approx(value) for value in expected]


def test_runs_are_complete_once_saved_and_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, jobs = small("budget-control", tmp_path)
    last_files = ("", "__0_0.distcp", "model.safetensors.index.json", ".metadata")
    for job, saved in zip(jobs, last_files, strict=False):  # killed before, and within the save
        write_run(job, {"step": 120}, saved=saved)
    assert [runner.is_done(job) for job in jobs] == [False, False, True, True, False]
    started: list[str] = []

    def train(job: Job, extra: Any, ranks: int) -> int:
        started.append(job.run.name)
        return 7 if len(started) == 2 else 0

    monkeypatch.setattr(runner, "_train", train)
    assert runner.run_jobs(jobs, [], 2) == 7  # the first failure ends the sequence
    assert started == [jobs[0].run.name, jobs[1].run.name]


def test_commands_ask_for_the_nodes_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "cost", "--model", "Qwen3-1.7B"]) == 0
    start = "\nsbatch --nodes=4 launch/train.slurm configs/qwen3_1.7b.toml "
    assert start in capsys.readouterr().out


def test_an_evaluation_unlike_the_papers_is_named() -> None:
    assert len(PAPER_TASKS) == 12
    record = {
        "tasks": {"sciq": 80.0, "mmlu_pro": 11.0},
        "metrics": {"sciq": "acc,none", "mmlu_pro": "exact_match,custom-extract"},
        "num_fewshot": {"sciq": 0, "mmlu_pro": 5},
    }
    assert check_examples(record) == []
    (message,) = check_examples(record | {"num_fewshot": {"sciq": 0, "mmlu_pro": 0}})
    assert message.startswith("mmlu_pro")


def test_metrics_and_examples_of_groups() -> None:
    results: dict[str, Any] = {
        "results": {"sciq": {"acc,none": 0.8, "acc_norm,none": 0.7}},
        "group_subtasks": {"mmlu_pro": ["hard", "mmlu_pro_law"], "hard": ["mmlu_pro_math"]},
        "n-shot": {"mmlu_pro_math": 5, "mmlu_pro_law": 5, "sciq": 0},
    }
    assert evaluate._metric("sciq", results["results"]["sciq"]) == "acc,none"
    assert evaluate._num_fewshot(results, "mmlu_pro") == 5
    results["n-shot"]["mmlu_pro_law"] = 0
    assert evaluate._num_fewshot(results, "mmlu_pro") is None
