"""The preflight: all mistakes at once, and figures that are those of the run."""

from __future__ import annotations

import functools
import json
import typing
from pathlib import Path
from typing import Any

import pytest

from benchmarks.amo_paper.resolve import fields
from tests.examples import ROOT
from torchtitan_ext.cli import main
from torchtitan_ext.config import checks, settings, values
from torchtitan_ext.tools import preflight

CONFIGS = ROOT / "configs"
MEMORY = "lasting memory of the fullest rank"


@functools.cache
def report(name: str, world: int, *overrides: str) -> dict[str, Any]:
    args = [f"--job.config_file={CONFIGS / f'{name}.toml'}", *overrides]
    config, problems = checks.validate_config(settings.load(args)[0], world)
    predicted = preflight.predict(config, world, problems)
    assert problems == []
    return predicted


def elements(predicted: dict[str, Any], muon: bool) -> int:
    rows = predicted["parameters"][:-1]
    return sum(row["elements"] for row in rows if (row["operator type"] != "AdamW") == muon)


# ------------------------------------------------------------------ mistakes


def test_a_mistake_hides_nothing_that_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(CONFIGS / "debug_llama3.toml")
    options = ["--training.seq_len=0", "--tokenizer.kind=hf", "--hf_assets_path=gone"]
    assert main(["preflight", file, "--world=2", "--json", *options]) == 1
    printed = json.loads(capsys.readouterr().out)
    names = [row["name"] for row in printed["parameters"]]
    assert "layers.*.attention.qkv_linear.wq.weight" in names
    fields = [line.partition(":")[0] for line in printed["errors"]]
    assert fields == ["training.seq_len", "hf_assets_path"]


def test_missing_things_are_no_mistakes_for_other_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["preflight", str(CONFIGS / "qwen3_1.7b.toml"), "--world", "32", "--json"]) == 0
    missing = json.loads(capsys.readouterr().out)["missing on this machine"]
    assert missing[0].startswith("hf_assets_path: ")


BROKEN: dict[str, tuple[str, ...]] = {
    "training": (
        *("steps=-5", "seq_len=0", "local_batch_size=0", "gc_freq=0", "max_norm=-1"),
        *("global_batch_size=0",),
    ),
    "optimizer": ("lr=-1", "weight_decay=nan", "eps=-1", "beta1=1", "beta2=-0.1", "name=AdaMu"),
    "optimizer.muon": ("momentum=2", "ns_dtype=int8", "ns_guard_every=-1", "bucket_bytes=0"),
    "optimizer.amo": ("observe_until=0", "sample_size=0", "transition_steps=-1", "base_ell=0"),
    "lr_scheduler": ("warmup_steps=-3", "decay_ratio=1.5", "min_lr_factor=-1", "total_steps=0"),
    "metrics": ("log_freq=0", "callbacks=nope.Nope"),
    "dataloader": ("seed=-1", "num_workers=-1", "prefetch_factor=0", "dataset=c5"),
    "validator": ("steps=0", "freq=0"),
    "validator.dataloader": ("dataset=c6", "seed=-2", "num_workers=-2"),
    "checkpoint": (
        *("interval=0", "keep_latest_k=1", "load_step=-2", "stop_seconds=0", "keep_every=-1"),
        *("exclude_from_loading=optimiser",),
    ),
    "parallelism": (
        *("data_parallel_replicate_degree=0", "tensor_parallel_degree=-1"),
        *("pipeline_parallel_microbatch_size=0", "context_parallel_load_balancer="),
    ),
    "compile": ("backend=fast",),
    "profiler": ("profile_freq=0", "profiler_warmup=-1", "memory_snapshot_max_entries=0"),
    "comm": ("init_timeout_seconds=0", "train_timeout_seconds=-1", "trace_buf_size=-1"),
    "loss": ("num_chunks=0",),
    "debug": ("seed=-1",),
    "model": ("name=lama3",),
}
"""Values by section that no run can use."""
ON = tuple(f"--{section}.enable" for section in ("validator", "compile", "checkpoint"))
ON += ("--profiler.enable_profiling",)


def named_fields(capsys: pytest.CaptureFixture[str], *options: str) -> list[str]:
    file = str(CONFIGS / "debug_llama3.toml")
    assert main(["preflight", file, "--world=2", "--json", *options]) == 1
    return [line.partition(":")[0] for line in json.loads(capsys.readouterr().out)["errors"]]


def test_all_mistakes_are_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    fields = {f"{section}.{pair}" for section, pairs in BROKEN.items() for pair in pairs}
    assert len(fields) > 50
    found = named_fields(capsys, *ON, *(f"--{field}" for field in fields))
    assert sorted(found) == sorted(field.partition("=")[0] for field in fields)


@pytest.mark.parametrize("section", BROKEN)
def test_a_mistake_alone_is_named_and_no_other(
    section: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for pair in BROKEN[section]:
        field = f"{section}.{pair}"
        assert named_fields(capsys, *ON, f"--{field}") == [field.partition("=")[0]]


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("parallelism", ["--parallelism.data_parallel_replicate_degree=16"]),
        ("training.global_batch_size", ["--training.global_batch_size=7"]),
        ("training.seq_len", ["--parallelism.tensor_parallel_degree=2", "--training.seq_len=63"]),
        ("optimizer.lr_multipliers", ["--optimizer.lr_multipliers", ".*wq.*", "-1"]),
        ("optimizer.no_decay", ["--optimizer.no_decay", "nowhere"]),
        ("checkpoint.create_seed_checkpoint", ["--checkpoint.create_seed_checkpoint"]),
        ("checkpoint.load_step", ["--checkpoint.load_step=0"]),
        ("checkpoint.initial_load_path", ["--checkpoint.initial_load_path=/gone"]),
        (
            "parallelism.pipeline_parallel_schedule",
            [f"--parallelism.pipeline_parallel_{pair}" for pair in ("degree=2", "schedule=2F2B")],
        ),
        ("profiler.profile_freq", ["--profiler.enable_profiling", "--profiler.profile_freq=3"]),
        ("debug", ["--debug.batch_invariant"]),
        ("model.attention", ["--model.attention=flex"]),
    ],
)
def test_what_ranks_would_refuse_is_named(
    field: str, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert named_fields(capsys, "--checkpoint.enable", *options) == [field]


def test_no_number_is_out_of_every_range() -> None:
    """Each number of each section has a least value: a new field joins, or is named here."""
    free = {"optimizer.muon.nesterov", "optimizer.amo.nesterov"}  # also true or false
    config = settings.load([])[0]
    accepted = []
    for name, value in fields(values.plain(config)):
        kinds = str(kind_of(config, name))
        if name in free or not ("int" in kinds or "float" in kinds) or isinstance(value, bool):
            continue
        *sections, field = name.split(".")
        change: Any = {field: -3}
        for section in reversed(sections):
            change = {section: change}
        problems: list[str] = []
        changed = values.overlaid(config, change, problems)
        problems = checks.validate_config(changed, 2, problems)[1]
        if not any(line.startswith(f"{name}: ") for line in problems):
            accepted.append(name)
    assert accepted == []


def kind_of(config: Any, name: str) -> Any:
    """Declared type of a field by its dotted name."""
    *sections, field = name.split(".")
    for section in sections:
        config = getattr(config, section)
    return typing.get_type_hints(type(config))[field]


# ------------------------------------------------------------------ figures


def test_memory_is_that_of_parameters_gradients_and_state() -> None:
    predicted = report("qwen3_1.7b", 32)
    muon, adamw = elements(predicted, muon=True), elements(predicted, muon=False)
    memory = predicted[MEMORY]
    assert memory["state_bytes"] == pytest.approx((4 * muon + 8 * adamw) / 32, rel=1e-6)
    for name in ("parameter_bytes", "gradient_bytes"):
        assert memory[name] == pytest.approx(4 * (muon + adamw) / 32, rel=1e-6)
    adamuon = report("qwen3_1.7b", 32, "--optimizer.name=AdaMuon")  # two values everywhere
    state = 8 * (muon + adamw) / 32
    assert adamuon[MEMORY]["state_bytes"] == pytest.approx(state, rel=1e-6)
    assert predicted["run"]["checkpoint_bytes"] == 4 * (muon + adamw) + 4 * muon + 8 * adamw


def test_the_timeline() -> None:
    assert report("qwen3_1.7b", 32)["timeline"] == {
        "rate at its peak": 345,
        "first observation": 375,
        "last observation, plan": 3000,
        "locked": 3300,
        "end": 6912,
    }
