"""The catalog of experiments: the paper's tables, row by row, and the options of each run."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from amo_dist.schedule.planning import plan_allocation, targets
from benchmarks.amo_paper import geometry
from benchmarks.amo_paper.__main__ import build_parser
from benchmarks.amo_paper.catalog import (
    ALL_RUNS,
    EXPERIMENTS,
    MODELS,
    SCHEDULERS,
    experiment_named,
)
from benchmarks.amo_paper.resolve import (
    QUICKSTART,
    ROOT,
    Job,
    Place,
    resolve,
)
from torchtitan_ext.config import files, settings
from torchtitan_ext.plugin import optimizers

PAPER = Place()
SMALL = Place(base=QUICKSTART, small=True)
GOLDEN = ROOT / "tests" / "golden"

MADE_BY_OTHER_RUNS = {"optimizer.muon.schedule_file"}
"""Options that name files which are not here before other runs have made them."""


def printed(name: str) -> list[tuple[str, str]]:
    """Block and label of each row of the paper's table."""
    if name == "main":
        rows = json.loads((GOLDEN / "paper_main_results.json").read_text())
    elif name.startswith("ablation-"):
        every = json.loads((GOLDEN / "paper_other_results.json").read_text())["ablations"]
        block = experiment_named(name).rows[0].block
        rows = [row for row in every if row["model"] == block]
    else:
        rows = json.loads((GOLDEN / "paper_other_results.json").read_text())[name]
    return [(row["model"], row["optimizer"]) for row in rows]


SCORED = [name for name, experiment in EXPERIMENTS.items() if experiment.kind == "scores"]


@pytest.mark.parametrize("name", SCORED)
def test_rows_are_those_of_the_papers_table(name: str) -> None:
    rows = [(row.block, row.label) for row in EXPERIMENTS[name].rows]
    assert rows == printed(name)


def test_runs_in_all() -> None:
    shared = Counter(run.name for e in EXPERIMENTS.values() for run in e.runs())
    # The default AMO run of Qwen3-0.6B is one run of main, four ablations and budget control.
    assert shared["qwen3-0.6b-amo"] == 6
    assert shared["llama-3.1-760m-amo"] == 2
    # 174 entries above, less the repetitions: 5 + 1 of these two; Muon-KJ of Qwen3-0.6B once
    # (ns-steps); Muon-KJ and Muon-PE of two models (static); all four of cost.
    assert len(ALL_RUNS) == 174 - 5 - 1 - 1 - 4 - 4


def test_one_name_is_one_run() -> None:
    by_name: dict[str, Any] = {}
    by_content: dict[str, str] = {}
    for experiment in EXPERIMENTS.values():
        for run in experiment.runs():
            assert by_name.setdefault(run.name, run) == run
            job = resolve(run, PAPER)
            content = repr((job.config, sorted(job.options.items())))
            assert by_content.setdefault(content, run.name) == run.name


def parsed(job: Job) -> Any:
    known = [a for a in job.arguments() if a[2:].partition("=")[0] not in MADE_BY_OTHER_RUNS]
    if job.options["optimizer.name"] not in optimizers.OPTIMIZERS:
        known.append("--optimizer.name=Muon")  # the last one counts
    return settings.parse([f"--job.config_file={ROOT / job.config}", *known])


@pytest.mark.slow
@pytest.mark.parametrize("place", [PAPER, SMALL], ids=["paper", "small"])
def test_torchtitan_takes_every_option(place: Place) -> None:
    taken: set[tuple[str, ...]] = set()
    for run in ALL_RUNS.values():
        job = resolve(run, place)
        names = tuple(sorted(f"{name}={type(v).__name__}" for name, v in job.options.items()))
        if names not in taken:  # else the same fields with other values
            taken.add(names)
            config = parsed(job)
            assert config.training.steps == job.steps
            assert config.dump_folder == str(job.folder)
    assert len(taken) >= 10


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "qwen3-0.6b-amo-5x",
            {
                "training.steps": 14300,
                "lr_scheduler.warmup_steps": 715,
                "optimizer.lr": 1.801e-3 * 5**-0.3509,
            },
        ),
        (
            "qwen3-0.6b-muon-pe-continual",
            {
                "optimizer.name": "Muon-PE",
                "checkpoint.initial_load_path": (
                    "outputs/experiments/qwen3-0.6b-amo-5x/checkpoint/step-14300"
                ),
            },
        ),
        (
            "qwen3-0.6b-amo-observation-800-100",
            {"optimizer.amo.observe_until": 800, "optimizer.amo.observe_every": 100},
        ),
        ("qwen3-300m-muon-kj-a4", {"optimizer.name": "Muon", "optimizer.muon.schedule": "a4"}),
        (
            "llama-3.1-760m-curriculum-muon-cosine-descend",
            {
                "optimizer.name": "Muon",
                "dataloader.order": "descend",
                "lr_scheduler.warmup_steps": 193,
                "lr_scheduler.total_steps": 3866,
                "lr_scheduler.decay_ratio": "None",
            },
        ),
        (
            "llama-3.1-480m-muon-kj-geometry",
            {"metrics.callbacks": "benchmarks.amo_paper.geometry.Geometry"},
        ),
    ],
)
def test_options_of_a_run(name: str, expected: dict[str, object]) -> None:
    options = resolve(ALL_RUNS[name], PAPER).options
    assert {key: options.get(key) for key in expected} == expected


def test_every_run_of_amo_plans_as_the_paper() -> None:
    runs = [run for run in ALL_RUNS.values() if run.options["optimizer.name"] == "AMO"]
    assert len(runs) == 4 + 4 + 1 + (2 + 2 + 3 + 3) + 8
    jobs = [resolve(run, place) for run in runs for place in (PAPER, SMALL)]
    kinds = {(job.config, job.options.get("optimizer.amo.planner")): job for job in jobs}
    for job in kinds.values():
        assert parsed(job).optimizer.amo.planner == "paper", job.config


@pytest.mark.parametrize("place", [PAPER, SMALL], ids=["paper", "small"])
@pytest.mark.parametrize(
    ("name", "allocation"),
    [
        ("llama-3.1-760m-amo-budget-0.9", (6, 4, 4, 6, 4, 4, 4)),
        ("qwen3-0.6b-amo-shrinkage-1", (3, 6, 6, 3, 6, 6, 5)),
    ],
)
def test_plans_are_those_of_the_papers_algorithm(
    place: Place, name: str, allocation: tuple[int, ...]
) -> None:
    amo = parsed(resolve(ALL_RUNS[name], place)).optimizer.amo
    # The paper prints no targets of Qwen3-0.6B: those of Llama-3.1-760M stand in.
    rows = json.loads((GOLDEN / "locked_schedules.json").read_text())["Llama-3.1-760M"]
    # What was observed there, where the shrinkage is 0.7.
    robust = [(row["ell_target"] - 0.3 * 1e-3) / 0.7 for row in rows.values()]
    found = dict(zip(rows, targets(amo, robust), strict=True))
    assert plan_allocation(amo, found).allocation == allocation


def test_curriculum_has_the_papers_steps() -> None:
    # Total steps, (warmup, stable), (warmup, stable, decay), (warmup, end of decay).
    table = {
        "Llama-3.1-760M": (3622, (181, 3441), (181, 3079, 362), (193, 3866)),
        "Qwen3-0.6B": (2860, (143, 2717), (143, 2431, 286), (143, 2860)),
    }
    for model, (total, ws, wsd, cosine) in table.items():
        runs = [run for run in EXPERIMENTS["curriculum"].runs() if run.model == model]
        assert {resolve(run, PAPER).steps for run in runs} == {total}
        found = SCHEDULERS[model]
        assert found["WS"]["lr_scheduler.warmup_steps"] == ws[0] == total - ws[1]
        decay = round(total * float(found["WSD"]["lr_scheduler.decay_ratio"]))
        warmup = found["WSD"]["lr_scheduler.warmup_steps"]
        assert (warmup, total - wsd[0] - decay, decay) == wsd
        end = found["Cosine"].get("lr_scheduler.total_steps", total)
        assert (found["Cosine"]["lr_scheduler.warmup_steps"], end) == cosine


@pytest.mark.parametrize("name", MODELS)
def test_geometry_logs_call_models_and_families_as_the_catalog_does(name: str) -> None:
    config = settings.parse([f"--job.config_file={ROOT / 'configs' / MODELS[name].stem}.toml"])
    assert geometry.family_label(config) == MODELS[name].family
    assert geometry.model_label(config) == name


def test_static_runs_make_their_schedule_from_the_pilots_logs() -> None:
    run = ALL_RUNS["qwen3-1.7b-muon-kj-static-floor-5e-2-family"]
    job = resolve(run, PAPER)
    (made,) = job.prepare
    assert made[-1] == job.options["optimizer.muon.schedule_file"]
    args = build_parser().parse_args(list(made))
    assert (args.rule, args.tolerance, args.family) == ("floor", 5e-2, "Qwen3")
    folders = {str(resolve(run, PAPER).folder) for run in EXPERIMENTS["geometry"].runs()}
    assert {str(Path(log).parent) for log in args.logs} == folders
    # One file for each rule, tolerance and pool: the models of a mixed pool share theirs.
    files = {resolve(run, PAPER).prepare[0][-1] for run in ALL_RUNS.values() if run.static}
    assert len(files) == 6 + 12


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_small_runs_are_consistent(name: str) -> None:
    base = files.read(ROOT / QUICKSTART)
    experiment = experiment_named(name)
    one = experiment.for_model(experiment.rows[0].run.model)
    jobs = [resolve(run, SMALL) for run in one.runs()]
    assert len({job.folder for job in jobs}) == len(jobs)
    contents = [repr(sorted(job.options.items())) for job in jobs]
    assert len(set(contents)) == len(jobs), "two runs of the paper became one"
    for job in jobs:
        config = {**base["optimizer"]["amo"], **amo_options(job)}
        assert config["observe_until"] % config["observe_every"] == 0
        if job.options["optimizer.name"] == "AMO":
            assert config["observe_until"] + config["transition_steps"] <= job.steps
        assert 0 < float(job.options.get("optimizer.lr", 1)) <= base["optimizer"]["lr"] * 1.01 or (
            "optimizer.lr" not in job.options
        )


def amo_options(job: Job) -> dict[str, Any]:
    prefix = "optimizer.amo."
    found = job.options.items()
    return {name.removeprefix(prefix): v for name, v in found if name.startswith(prefix)}
