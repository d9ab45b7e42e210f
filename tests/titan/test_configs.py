"""Every number of the paper's configs, derived again from its tables and its scaling law."""

from __future__ import annotations

import functools
import json
import math
import os
import re
import subprocess
import venv
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import tomllib
import yaml

from amo_dist.config import AMOConfig
from amo_dist.schedule.coefficients import named_schedule
from benchmarks.amo_paper.learning_rate import scaling_law_lr
from torchtitan_ext.config import settings
from torchtitan_ext.config.schedule_file import load_schedule_file
from torchtitan_ext.plugin import models

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
SPECS = json.loads((ROOT / "tests/golden/model_specs.json").read_text())
RUNS = json.loads((ROOT / "tests/golden/pretrain_runs.json").read_text())
SEQ_LEN = 2048
NAMES = sorted(path.stem for path in CONFIGS.glob("*.toml"))
SMALL = ("quickstart", "debug_llama3", "debug_qwen3")

PAPER_HORIZONS = {  # observe_until, observe_every, transition_steps
    "Qwen3-0.6B": (1200, 150, 300),
    "Llama-3.1-760M": (1200, 150, 300),
    "Qwen3-1.7B": (3000, 375, 300),
    "Llama-3.1-1.4B": (3000, 375, 300),
}
RUN_TABLE = [(model, family) for model in SPECS for family in ("muon", "adamw")]


def stem(model: str, family: str) -> str:
    name = model.lower().replace("llama-", "llama").replace("-", "_")
    return name + ("_adamw_paper" if family == "adamw" else "")


@functools.cache
def parsed(name: str) -> Any:
    return settings.parse([f"--job.config_file={CONFIGS / f'{name}.toml'}"])


def steps_of(run: dict[str, Any]) -> int:
    """The table's steps, unless they miss its token budget by more than the budget's rounding."""
    tokens_a_step = run["product"] * SEQ_LEN
    # 5.98 against 6.00 (a decimal cut) is within; 1.41 against 1.05 is not.
    if abs(run["steps"] * tokens_a_step / 1e9 - run["tokens_b"]) < 0.025:
        return int(run["steps"])
    return round(run["tokens_b"] * 1e9 / tokens_a_step)


def nominal_size(model: str) -> float:
    """Parameters in billions, from the model's name."""
    size = model.rsplit("-", 1)[1]
    return float(size[:-1]) * {"M": 1e-3, "B": 1.0}[size[-1]]


def horizon(model: str, steps: int) -> tuple[int, int, int]:
    if model in PAPER_HORIZONS:
        return PAPER_HORIZONS[model]
    interval = math.floor(Fraction(2, 5) * steps / 8 + Fraction(1, 2))
    return 8 * interval, interval, min(300, steps // 10)


def test_every_config_is_of_the_paper_or_small() -> None:
    papers = {stem(*row) for row in RUN_TABLE} | {"cpt_qwen3_0.6b", "qwen3_1.7b_hsdp", "smoke_h100"}
    assert {*NAMES} == papers | {*SMALL}


@pytest.mark.parametrize("name", NAMES)
def test_plans_are_the_papers_but_in_small_configs(name: str) -> None:
    config = parsed(name)
    amo, expected = config.optimizer.amo, AMOConfig() if name in SMALL else AMOConfig.paper()
    if config.optimizer.name == "AMO":
        assert (amo.planner, amo.update_norm) == (expected.planner, expected.update_norm)
    assert config.debug.seed == 42
    assert config.compile.enable == (name not in SMALL)


@pytest.mark.parametrize(("model", "family"), RUN_TABLE)
def test_a_run_follows_the_papers_tables(model: str, family: str) -> None:
    run, config = RUNS[family][model], parsed(stem(model, family))
    training, schedule, checkpoint = config.training, config.lr_scheduler, config.checkpoint
    assert training.local_batch_size == run["micro_batch"]
    assert training.global_batch_size == run["gpus"] * run["micro_batch"] * run["grad_accum"]
    assert training.steps == steps_of(run)
    assert training.seq_len == SEQ_LEN == SPECS[model]["context"]
    assert (training.max_norm, training.mixed_precision_param) == (1.0, "bfloat16")
    tokens = training.steps * training.global_batch_size * SEQ_LEN
    # Half a step, and half a unit of the last printed digit (the paper cut 5.998 to 5.98).
    slack = training.global_batch_size * SEQ_LEN / 2 + 0.02e9
    assert tokens == pytest.approx(run["tokens_b"] * 1e9, abs=slack)
    assert schedule.warmup_steps == training.steps // 20
    assert schedule.min_lr_factor == 0.1
    expected = ("linear", 0.1) if family == "adamw" else ("cosine", None)
    assert (schedule.decay_type, schedule.decay_ratio) == expected
    assert schedule.total_steps is None
    assert config.model.flavor == model
    assert model in models.FLAVORS[config.model.name]
    assert checkpoint.enable
    assert not checkpoint.last_save_model_only
    assert checkpoint.interval <= training.steps / 6


@pytest.mark.parametrize(("model", "family"), RUN_TABLE)
def test_optimizer_settings_are_the_papers(model: str, family: str) -> None:
    run, optimizer = RUNS[family][model], parsed(stem(model, family)).optimizer
    # Four digits, as the paper prints rates.
    rate = scaling_law_lr(nominal_size(model), run["tokens_b"])
    assert optimizer.lr == float(f"{rate:.3e}")
    assert optimizer.name == {"muon": "AMO", "adamw": "AdamW"}[family]
    assert (optimizer.beta1, optimizer.beta2, optimizer.eps) == (0.9, 0.95, 1e-8)
    assert optimizer.weight_decay == 0.1
    if family == "adamw":
        return
    amo, steps = optimizer.amo, steps_of(run)
    assert (amo.observe_until, amo.interval, amo.transition_steps) == horizon(model, steps)
    assert (amo.sample_size, amo.shrinkage, amo.budget_ratio) == (8, 0.7, 1.0)
    assert (amo.base_steps, amo.min_steps, amo.max_steps, amo.base_ell) == (5, 3, 7, 1e-3)
    assert (amo.momentum, amo.nesterov, amo.seed) == (0.95, True, 42)
    assert amo.lock_step <= steps


def test_the_table_contradicts_itself_twice() -> None:
    """A sum that misses the budget of tokens, and a product that is another batch."""
    rows = [
        (model, family)
        for model, family in RUN_TABLE
        for run in [RUNS[family][model]]
        if run["product"] != run["global_batch"] or steps_of(run) != run["steps"]
    ]
    assert rows == [("Qwen3-70M", "muon"), ("Qwen3-1.7B", "adamw")]
    assert parsed("qwen3_70m").training.steps == 398
    assert parsed("qwen3_1.7b_adamw_paper").training.global_batch_size == 2400


def test_continual_pretraining() -> None:
    config, base = parsed("cpt_qwen3_0.6b"), parsed("qwen3_0.6b")
    training = config.training
    tokens_b = training.steps * training.global_batch_size * SEQ_LEN / 1e9
    assert (training.steps, tokens_b) == (8580, pytest.approx(36, abs=0.02))  # whole steps
    assert config.optimizer.lr == float(f"{scaling_law_lr(0.6, 36.0):.3e}")
    assert config.optimizer.amo == base.optimizer.amo
    assert config.checkpoint.initial_load_model_only
    # Every step that the paper evaluates is kept.
    assert all(step % config.checkpoint.interval == 0 for step in (2000, 4000, 6000, 8000))
    assert config.checkpoint.keep_latest_k == 0
    # It continues the run of 60 billion tokens.
    assert config.checkpoint.initial_load_path.endswith(f"step-{5 * base.training.steps}")


@pytest.mark.parametrize("heading", ["WS", "WSD", "Cosine", "Constant"])
def test_schedules_of_the_readme_can_be_pasted_into_a_config(heading: str, tmp_path: Path) -> None:
    readme = (CONFIGS / "README.md").read_text()
    block = re.search(rf"^##+ {heading}\n.*?```toml\n(.*?)```", readme, re.DOTALL | re.MULTILINE)
    assert block is not None
    path = tmp_path / "config.toml"
    path.write_text(f"extends = '{CONFIGS / 'qwen3_0.6b.toml'}'\n{block[1]}")
    config = settings.parse([f"--job.config_file={path}"])
    for name, value in tomllib.loads(block[1])["lr_scheduler"].items():
        assert getattr(config.lr_scheduler, name) == value


@pytest.mark.parametrize("name", ["a1", "a2", "a3", "a4", "a5"])
def test_shipped_files_are_the_named_tables(name: str) -> None:
    found = load_schedule_file(CONFIGS / "schedules" / f"{name}.toml")
    assert found == dict(named_schedule(name).by_type)


# ------------------------------------------------------------------ manifests of clusters


def test_the_pods_of_a_jobset_may_save() -> None:
    jobset = yaml.safe_load((ROOT / "launch/jobset.yaml").read_text())
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert job["completions"] == job["parallelism"]
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # podFailurePolicy needs it
    config = settings.parse([f"--job.config_file={CONFIGS / 'smoke_h100.toml'}"], 32)
    assert pod["terminationGracePeriodSeconds"] > config.checkpoint.stop_seconds + 30


@pytest.mark.parametrize(
    ("file", "kind"),
    [("jobset.yaml", "JobsetV1alpha2JobSet"), ("trainjob.yaml", "TrainerV1alpha1TrainJob")],
)
def test_a_manifest_has_the_fields_of_its_kind(file: str, kind: str) -> None:
    """A model checks the types of its fields, and leaves out a field that it does not know."""
    kinds = pytest.importorskip("kubeflow_trainer_api.models")
    manifest = yaml.safe_load((ROOT / "launch" / file).read_text())
    assert getattr(kinds, kind).from_dict(manifest).to_dict() == manifest


@pytest.mark.slow
def test_skypilot_reads_its_file(tmp_path: Path) -> None:
    """In an environment of its own: SkyPilot brings a hundred packages along."""
    venv.create(tmp_path, with_pip=True)
    python = str(tmp_path / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", "skypilot==0.14.1"], check=True)
    code = "import sky; t = sky.Task.from_yaml('launch/sky.yaml'); (r,) = t.resources; "
    code += "print(t.num_nodes, r.accelerators['H100'], r.job_recovery['recover_on_exit_codes'])"
    outside = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    outside["HOME"] = str(tmp_path)
    found = subprocess.check_output([python, "-c", code], cwd=ROOT, env=outside, text=True)
    assert found.splitlines()[-1] == "4 8 [75]"


def test_the_first_run_of_a_cluster_locks() -> None:
    file = "configs/smoke_h100.toml"
    for name in ("jobset.yaml", "trainjob.yaml", "sky.yaml"):
        assert file in (ROOT / "launch" / name).read_text()
    config = settings.parse([f"--job.config_file={ROOT / file}"], 32)
    assert config.optimizer.amo.lock_step < config.training.steps == 10
