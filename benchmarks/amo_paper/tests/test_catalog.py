"""The catalog of experiments: the paper's tables, row by row, and the options of each run."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from amo_dist.optimizers.named import OPTIMIZER_NAMES
from benchmarks.amo_paper import geometry
from benchmarks.amo_paper.__main__ import build_parser
from benchmarks.amo_paper.catalog import ALL_RUNS, EXPERIMENTS, MODELS
from benchmarks.amo_paper.resolve import ROOT, Job, Place, resolve
from torchtitan_ext.config import settings

PAPER, SMALL = Place(), Place(small=True)
GOLDEN = Path(__file__).parent / "golden"


def printed(name: str) -> list[tuple[str, str]]:
    """Block and label of each row of the paper's table."""
    other = json.loads((GOLDEN / "paper_other_results.json").read_text())
    if name == "main":
        rows = json.loads((GOLDEN / "paper_main_results.json").read_text())
    elif name.startswith("ablation-"):
        block = EXPERIMENTS[name].rows[0].block
        rows = [row for row in other["ablations"] if row["model"] == block]
    else:
        rows = other[name]
    return [(row["model"], row["optimizer"]) for row in rows]


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name not in ("geometry", "cost")])
def test_rows_are_those_of_the_papers_table(name: str) -> None:
    assert [(row.block, row.label) for row in EXPERIMENTS[name].rows] == printed(name)


def test_one_name_is_one_run() -> None:
    names: dict[str, str] = {}
    for run in ALL_RUNS.values():
        job = resolve(run, PAPER)
        content = repr((job.config, sorted(job.options.items())))
        assert names.setdefault(content, run.name) == run.name
    # 174 entries of the tables, less the repetitions: 5 + 1 of two runs of AMO; Muon-KJ of
    # Qwen3-0.6B once (ns-steps); Muon-KJ and Muon-PE of two models (static); all four of cost.
    assert len(ALL_RUNS) == 174 - 5 - 1 - 1 - 4 - 4


def parsed(job: Job) -> Any:
    # Other runs make this file.
    known = [a for a in job.arguments() if not a.startswith("--optimizer.muon.schedule_file")]
    if job.options["optimizer.name"] not in OPTIMIZER_NAMES:
        known.append("--optimizer.name=Muon")  # the last one counts
    return settings.parse([f"--job.config_file={ROOT / job.config}", *known])


@pytest.mark.parametrize("place", [PAPER, SMALL], ids=["paper", "small"])
def test_torchtitan_takes_every_option(place: Place) -> None:
    taken: set[tuple[str, ...]] = set()
    experiments = [e for e in EXPERIMENTS.values() if not (place.small and e.counts_steps())]
    for run in itertools.chain(*(experiment.runs() for experiment in experiments)):
        job = resolve(run, place)
        names = tuple(sorted(f"{name}={type(v).__name__}" for name, v in job.options.items()))
        if names in taken:  # the same fields with other values
            continue
        taken.add(names)
        config = parsed(job)
        assert (config.training.steps, config.dump_folder) == (job.steps, str(job.folder))
        if run.options["optimizer.name"] == "AMO":
            amo = config.optimizer.amo
            assert amo.planner == "paper"
            assert amo.observe_until + amo.transition_steps <= job.steps


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "qwen3-0.6b-amo-5x",
            {"training.steps": 14300, "optimizer.lr": 1.801e-3 * 5**-0.3509},
        ),
        (
            "llama-3.1-760m-curriculum-muon-cosine-descend",
            {
                "dataloader.order": "descend",
                "lr_scheduler.warmup_steps": 193,
                "lr_scheduler.total_steps": 3866,
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


@pytest.mark.parametrize("name", MODELS)
def test_geometry_logs_call_families_as_the_catalog_does(name: str) -> None:
    config = settings.parse([f"--job.config_file={ROOT / 'configs' / MODELS[name].stem}.toml"])
    assert geometry.family_label(config) == MODELS[name].family


def test_static_runs_make_their_schedule_from_the_pilots_logs() -> None:
    job = resolve(ALL_RUNS["qwen3-1.7b-muon-kj-static-floor-5e-2-family"], PAPER)
    made = job.prepare
    assert made[-1] == job.options["optimizer.muon.schedule_file"]
    args = build_parser().parse_args(list(made))
    assert (args.rule, args.tolerance, args.family) == ("floor", 5e-2, "Qwen3")
    folders = {str(resolve(run, PAPER).folder) for run in EXPERIMENTS["geometry"].runs()}
    assert {str(Path(log).parent) for log in args.logs} == folders
