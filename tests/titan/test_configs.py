"""Every number of the paper's configs, derived again from its tables and its scaling law."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import tomllib
import torch
from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.config.configs import CommConfig

from amo_dist.config import AMOConfig
from amo_dist.kernels.geometry import SPECTRAL_METRICS
from amo_dist.tools.tracker import WHAT
from benchmarks.amo_paper.learning_rate import scaling_law_lr
from torchtitan_ext.config import files, settings
from torchtitan_ext.plugin import models
from torchtitan_ext.plugin.geometry import Geometry
from torchtitan_ext.tools.preflight_memory import EAGER_LOGIT_BYTES

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
SPECS = json.loads((ROOT / "tests/golden/model_specs.json").read_text())
RUNS = json.loads((ROOT / "tests/golden/pretrain_runs.json").read_text())
SEQ_LEN = 2048

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


def own(name: str) -> str:
    return (CONFIGS / f"{name}.toml").read_text()


def text(name: str) -> str:
    """With that of the files that it extends."""
    return "\n".join(path.read_text() for path, _ in files.chain(CONFIGS / f"{name}.toml"))


def round_half_up(value: Fraction) -> int:
    return math.floor(value + Fraction(1, 2))


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
    interval = round_half_up(Fraction(2, 5) * steps / 8)
    return 8 * interval, interval, min(300, steps // 10)


AMO_CONFIGS = sorted(p.stem for p in CONFIGS.glob("*.toml") if "_adamw_" not in p.stem)


@pytest.mark.parametrize("name", AMO_CONFIGS)
def test_plans_are_the_papers_but_in_small_configs(name: str) -> None:
    is_small = name == "quickstart" or name.startswith("debug_")
    amo, expected = parsed(name).optimizer.amo, AMOConfig() if is_small else AMOConfig.paper()
    assert amo.planner == expected.planner
    assert amo.update_norm == expected.update_norm
    # A change of the default leaves the paper's configs as they are.
    for pin in ('\nplanner = "paper"', '\nupdate_norm = "as_is"'):
        assert (pin in text(name)) == (not is_small)


def test_every_config_is_of_the_paper_or_small() -> None:
    small = {"quickstart", "debug_llama3", "debug_qwen3"}
    papers = {stem(*row) for row in RUN_TABLE} | {"cpt_qwen3_0.6b", "qwen3_1.7b_hsdp"}
    assert {path.stem for path in CONFIGS.glob("*.toml")} == papers | small


@pytest.mark.parametrize("name", ["quickstart", "debug_llama3", "debug_qwen3"])
def test_small_configs_have_a_seed(name: str) -> None:
    assert parsed(name).debug.seed == 42


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.toml")))
def test_time_outs_of_clusters_fit_each_other(name: str) -> None:
    if name == "quickstart" or name.startswith("debug_"):
        return
    comm = parsed(name).comm
    hub_seconds = 300  # over which the hub counts requests, and asks to come back
    assert 0.8 * comm.init_timeout_seconds > hub_seconds
    assert comm.train_timeout_seconds == CommConfig().train_timeout_seconds
    script = (ROOT / "launch" / "train.slurm").read_text()
    (announced,) = re.findall(r"^#SBATCH --signal=B:USR1@(\d+)$", script, re.MULTILINE)
    # To end, and to queue the job again.
    assert int(announced) > parsed(name).checkpoint.stop_seconds + 60


@pytest.mark.parametrize(("model", "family"), RUN_TABLE)
def test_batch_and_steps_follow_the_run_table(model: str, family: str) -> None:
    run, training = RUNS[family][model], parsed(stem(model, family)).training
    assert training.local_batch_size == run["micro_batch"]
    assert training.global_batch_size == run["gpus"] * run["micro_batch"] * run["grad_accum"]
    assert training.steps == steps_of(run)
    assert training.seq_len == SEQ_LEN == SPECS[model]["context"]
    assert training.max_norm == 1.0
    assert training.mixed_precision_param == "bfloat16"
    tokens = training.steps * training.global_batch_size * SEQ_LEN
    # Half a step, and half a unit of the last printed digit (the paper cut 5.998 to 5.98).
    slack = training.global_batch_size * SEQ_LEN / 2 + 0.02e9
    assert tokens == pytest.approx(run["tokens_b"] * 1e9, abs=slack)


@pytest.mark.parametrize(("model", "family"), RUN_TABLE)
def test_model_and_seeds(model: str, family: str) -> None:
    config = parsed(stem(model, family))
    assert config.model.flavor == model
    assert config.model.flavor in models.FLAVORS[config.model.name]
    assert config.debug.seed == config.dataloader.seed == 42
    assert config.dataloader.dataset == "packed"
    assert config.dataloader.dataset_path == f"data/fineweb_edu_{config.model.name}"


@pytest.mark.parametrize(("model", "family"), RUN_TABLE)
def test_the_rate_is_that_of_the_law(model: str, family: str) -> None:
    name, run = stem(model, family), RUNS[family][model]
    size, tokens = nominal_size(model), run["tokens_b"]
    # Four digits, as the paper prints rates.
    assert parsed(name).optimizer.lr == float(f"{scaling_law_lr(size, tokens):.3e}")
    comment = f"  # the paper's law at {size:g} (nominal) and {tokens:g} billion tokens\n"
    assert comment in text(model.lower().replace("llama-", "llama").replace("-", "_"))


@pytest.mark.parametrize(("model", "family"), RUN_TABLE)
def test_optimizer_settings_are_the_papers(model: str, family: str) -> None:
    optimizer = parsed(stem(model, family)).optimizer
    assert optimizer.name == {"muon": "AMO", "adamw": "AdamW"}[family]
    assert (optimizer.beta1, optimizer.beta2, optimizer.eps) == (0.9, 0.95, 1e-8)
    assert optimizer.weight_decay == 0.1
    if family == "adamw":
        return
    amo = optimizer.amo
    steps = steps_of(RUNS[family][model])
    assert (amo.observe_until, amo.interval, amo.transition_steps) == horizon(model, steps)
    assert amo.observe_until // amo.interval == 8
    assert (amo.sample_size, amo.shrinkage, amo.budget_ratio) == (8, 0.7, 1.0)
    assert (amo.base_steps, amo.min_steps, amo.max_steps, amo.base_ell) == (5, 3, 7, 1e-3)
    assert (amo.momentum, amo.nesterov, amo.seed) == (0.95, True, 42)
    assert amo.lock_step <= steps


@pytest.mark.parametrize(("model", "family"), RUN_TABLE)
def test_schedules_have_the_papers_shares(model: str, family: str) -> None:
    config = parsed(stem(model, family))
    schedule, steps = config.lr_scheduler, config.training.steps
    assert schedule.warmup_steps == steps // 20
    assert schedule.min_lr_factor == 0.1
    if family == "adamw":
        assert (schedule.decay_type, schedule.decay_ratio) == ("linear", 0.1)
    else:
        assert (schedule.decay_type, schedule.decay_ratio) == ("cosine", None)
    assert schedule.total_steps is None


@pytest.mark.parametrize(("model", "family"), RUN_TABLE)
def test_comments_state_the_numbers_of_the_file(model: str, family: str) -> None:
    name, run = stem(model, family), RUNS[family][model]
    config, found = parsed(name), text(name)
    training = config.training
    tokens_b = training.steps * training.global_batch_size * SEQ_LEN / 1e9
    assert f"steps = {training.steps}  # {tokens_b:.2f} billion tokens\n" in found
    product = f"{run['gpus']} ranks x {run['micro_batch']} x {run['grad_accum']} accumulated"
    assert f"global_batch_size = {training.global_batch_size}  # {product}\n" in found
    assert f"run of {run['tokens_b']:.2f} billion tokens on {run['gpus']} H100s" in found
    assert f"preflight configs/{name}.toml --world {run['gpus']}\n" in found
    if family == "muon":
        assert f"# locked at step {config.optimizer.amo.lock_step}\n" in found
    # A contradiction of the table is told where it was resolved, and nowhere else.
    contradicts = run["product"] != run["global_batch"] or steps_of(run) != run["steps"]
    assert ("The paper's table says" in own(name)) == contradicts


def test_the_table_contradicts_itself_twice() -> None:
    rows = [
        (model, family)
        for model, family in RUN_TABLE
        if "The paper's table says" in own(stem(model, family))
    ]
    assert rows == [("Qwen3-70M", "muon"), ("Qwen3-1.7B", "adamw")]
    assert parsed("qwen3_70m").training.steps == 398
    assert parsed("qwen3_1.7b_adamw_paper").training.global_batch_size == 2400


def test_checkpoints_bound_what_a_killed_run_loses() -> None:
    for model, family in RUN_TABLE:
        config = parsed(stem(model, family))
        checkpoint = config.checkpoint
        assert checkpoint.enable
        assert not checkpoint.last_save_model_only
        assert checkpoint.interval <= config.training.steps / 6, model


def test_continual_pretraining() -> None:
    config, base = parsed("cpt_qwen3_0.6b"), parsed("qwen3_0.6b")
    training = config.training
    tokens_b = training.steps * training.global_batch_size * SEQ_LEN / 1e9
    assert training.steps == 8580
    assert tokens_b == pytest.approx(36, abs=0.02)  # 8580 whole steps
    assert f"# {tokens_b:.2f} billion tokens\n" in text("cpt_qwen3_0.6b")
    assert config.dataloader.dataset_path == "data/slimpajama_qwen3"
    assert config.optimizer.lr == float(f"{scaling_law_lr(0.6, 36.0):.3e}")
    assert config.optimizer.amo == base.optimizer.amo
    assert config.lr_scheduler.warmup_steps == training.steps // 20
    assert config.checkpoint.initial_load_model_only
    # Every step that the paper evaluates is kept.
    assert all(step % config.checkpoint.interval == 0 for step in (2000, 4000, 6000, 8000))
    assert config.checkpoint.keep_latest_k == 0
    # It continues the run of 60 billion tokens that the README starts.
    match = re.search(r"step-(\d+)$", config.checkpoint.initial_load_path)
    assert match is not None
    steps = int(match[1])
    assert steps == 5 * base.training.steps
    readme = (CONFIGS / "README.md").read_text()
    assert f"--training.steps {steps} --optimizer.lr {scaling_law_lr(0.6, 60.0):.3e}" in readme


def test_prolonged_runs_of_the_readme() -> None:
    base = parsed("qwen3_0.6b")
    readme = (CONFIGS / "README.md").read_text()
    for times in (2, 5, 10):
        steps = times * base.training.steps
        rate = f"--optimizer.lr {scaling_law_lr(0.6, times * 12.0):.3e}"
        line = f"--training.steps {steps} {rate} --lr_scheduler.warmup_steps {steps // 20}\n"
        assert line in readme


# ------------------------------------------------------------------ learning rate schedules


def toml_text(heading: str) -> str:
    """The TOML below a heading of the README."""
    readme = (CONFIGS / "README.md").read_text()
    block = re.search(rf"^##+ {heading}\n.*?```toml\n(.*?)```", readme, re.DOTALL | re.MULTILINE)
    assert block is not None, heading
    return block[1]


def toml_block(heading: str) -> dict[str, Any]:
    return tomllib.loads(toml_text(heading))


def factors(heading: str, steps: int, **changes: Any) -> list[float]:
    """Rate of each step over the peak, from torchtitan's scheduler."""
    fields = {**toml_block(heading)["lr_scheduler"], **changes}
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    schedulers = LRSchedulersContainer.Config(**fields).build(
        optimizers=[optimizer], training_steps=steps
    )
    found = []
    for _ in range(steps):
        found.append(schedulers.schedulers[0].get_last_lr()[0])
        optimizer.step()
        schedulers.step()
    return found


PAPER_STEPS = {"Qwen3-0.6B": (2860, 143), "Llama-3.1-760M": (3622, 181)}
# Of one rounding of a product or quotient; the schedule is a handful of float64 operations.
EXACT = 1e-12


@pytest.mark.parametrize("model", PAPER_STEPS)
def test_ws(model: str) -> None:
    steps, warmup = PAPER_STEPS[model]
    found = factors("WS", steps, warmup_steps=warmup)
    assert found[:warmup] == pytest.approx([(i + 1) / warmup for i in range(warmup)], rel=EXACT)
    assert set(found[warmup:]) == {1.0}
    assert len(found) - warmup == {"Qwen3-0.6B": 2717, "Llama-3.1-760M": 3441}[model]


@pytest.mark.parametrize("model", PAPER_STEPS)
def test_wsd(model: str) -> None:
    steps, warmup = PAPER_STEPS[model]
    found = factors("WSD", steps, warmup_steps=warmup)
    decay = {"Qwen3-0.6B": 286, "Llama-3.1-760M": 362}[model]
    assert set(found[warmup : steps - decay]) == {1.0}
    assert steps - decay - warmup == {"Qwen3-0.6B": 2431, "Llama-3.1-760M": 3079}[model]
    # The first step of the decay is still at the peak, the last one short of the floor.
    line = [1 - 0.9 * i / decay for i in range(decay)]
    assert found[steps - decay :] == pytest.approx(line, rel=EXACT)


@pytest.mark.parametrize(
    ("steps", "warmup", "total"), [(2860, 143, None), (3622, 193, 3866), (3866, 193, None)]
)
def test_cosine(steps: int, warmup: int, total: int | None) -> None:
    found = factors("Cosine", steps, warmup_steps=warmup, total_steps=total)
    decay = (total or steps) - warmup
    curve = [0.1 + 0.45 * (1 + math.cos(math.pi * i / decay)) for i in range(steps - warmup)]
    assert found[warmup:] == pytest.approx(curve, rel=EXACT)
    # Stopped short of its total, a run ends above the floor; a whole one ends next to it.
    assert (found[-1] > 0.108) == (total is not None)


def test_constant() -> None:
    assert set(factors("Constant", 2860)) == {1.0}
    optimizer = toml_block("Constant")["optimizer"]
    assert optimizer == {"lr": 1.8e-3}
    # The paper: about the law's rate.
    assert optimizer["lr"] == pytest.approx(scaling_law_lr(0.6, 12.0), abs=0.5e-4)


def with_block(block: str, folder: Path) -> Any:
    """The config of Qwen3-0.6B with a block of TOML laid over it."""
    path = folder / "config.toml"
    path.write_text(f"extends = '{CONFIGS / 'qwen3_0.6b.toml'}'\n{block}")
    return settings.parse([f"--job.config_file={path}"])


@pytest.mark.parametrize("heading", ["WS", "WSD", "Cosine", "Constant"])
def test_every_schedule_can_be_pasted_into_a_config(heading: str, tmp_path: Path) -> None:
    config = with_block(toml_text(heading), tmp_path)
    for name, value in toml_block(heading)["lr_scheduler"].items():
        assert getattr(config.lr_scheduler, name) == value


# ------------------------------------------------------------------ on H100s

PAPERS = sorted({stem(*row) for row in RUN_TABLE} | {"cpt_qwen3_0.6b"})


@pytest.mark.parametrize("name", PAPERS)
def test_a_run_on_h100s_uses_what_torchtitan_has(name: str) -> None:
    config = parsed(name)
    assert config.compile.enable
    assert config.compile.components == ["model", "loss"]
    assert config.validator.enable
    assert config.validator.dataloader.dataset == "packed"
    assert config.validator.freq <= config.training.steps / 6
    assert config.checkpoint.async_mode == "async"


@pytest.mark.parametrize("name", ["quickstart", "debug_llama3", "debug_qwen3"])
def test_a_small_run_waits_for_no_compiler(name: str) -> None:
    assert not parsed(name).compile.enable


def activation_bytes(model: str, tokens: int) -> int:
    """Bytes that a rank keeps of a forward pass without recomputation, from above.

    In bfloat16, of each block: the inputs of its two norms and their results, queries and what
    attention gives in four forms each, keys and values in three, and four of the feed-forward; and
    the logits as an eager loss holds them.
    """
    spec = SPECS[model]
    queries = int(spec["dim"] * spec["q_ratio"])
    keys = queries // spec["heads"] * spec["kv_heads"]
    block = 4 * spec["dim"] + 4 * queries + 6 * keys + 4 * spec["ffn_dim"]
    family = "qwen3" if model.startswith("Qwen") else "llama3"
    vocab_size = models.FLAVORS[family][model][1]
    return tokens * (2 * spec["layers"] * block + EAGER_LOGIT_BYTES * vocab_size)


@pytest.mark.parametrize(("model", "family"), RUN_TABLE)
def test_nothing_is_computed_again_where_80_gb_hold_it(model: str, family: str) -> None:
    config = parsed(stem(model, family))
    assert config.activation_checkpoint.mode == "none"
    tokens = config.training.local_batch_size * SEQ_LEN
    # Beside it 16 bytes a parameter, over all ranks, and gathered blocks: under 5 GB.
    assert activation_bytes(model, tokens) < 0.8 * 80e9


@pytest.mark.parametrize("model", SPECS)
def test_one_option_trains_the_same_with_adamw(model: str) -> None:
    file = CONFIGS / f"{stem(model, 'muon')}.toml"
    config = settings.parse([f"--job.config_file={file}", "--optimizer.name", "AdamW"])
    with_amo = parsed(stem(model, "muon"))
    assert config.optimizer.name == "AdamW"
    assert config.optimizer.lr == with_amo.optimizer.lr
    for section in ("training", "lr_scheduler", "dataloader", "model", "compile"):
        assert getattr(config, section) == getattr(with_amo, section)


def commented(section: str) -> str:
    """A section that stands in a comment of the base, as one has it without the marks."""
    base = (CONFIGS / "base" / "h100.toml").read_text()
    block = re.search(
        rf"(?:^# .*\n)?((?:^# .*\n)*^# \[{section}\]\n(?:^# .*\n)+)", base, re.MULTILINE
    )
    assert block is not None
    lines = [line.removeprefix("# ") for line in block[1].splitlines()]
    return "\n".join(lines[lines.index(f"[{section}]") :]) + "\n"


def test_the_lines_of_the_base_that_stand_in_comments_are_good(tmp_path: Path) -> None:
    profiler = with_block(commented("profiler"), tmp_path).profiler
    assert profiler.enable_profiling
    assert (profiler.profiler_active, profiler.profiler_repeat) == (10, 1)
    override = with_block(commented("override"), tmp_path).override
    assert override.imports == ["torchtitan_ext.override.float8"]


# ------------------------------------------------------------------ geometry


def test_the_geometry_section_of_the_readme_is_the_code_s() -> None:
    section = dataclasses.asdict(Geometry(enable=True))
    assert toml_block("Geometry") == {"geometry": section}
    readme = (CONFIGS / "README.md").read_text()
    text = readme.partition("## Geometry\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE) == ["what", *WHAT]
    assert all(f"`{name}`" in text for name in SPECTRAL_METRICS)
