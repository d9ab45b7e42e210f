"""The preflight: all mistakes at once, and figures that are those of the run."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.examples import ROOT
from torchtitan_ext.cli import main
from torchtitan_ext.config import checks, settings
from torchtitan_ext.tools import preflight

CONFIGS = ROOT / "configs"
MEMORY = "memory of the fullest rank, without activations and gathered parameters"
STEP = "optimizer step, mean of ranks"


@functools.cache
def report(name: str, world: int, *overrides: str) -> dict[str, Any]:
    args = [f"--job.config_file={CONFIGS / f'{name}.toml'}", *overrides]
    config, problems = checks.validate_config(settings.load(args), world)
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


@pytest.mark.parametrize(("chunks", "status"), [(1, 1), (4, 0)])
def test_logits_must_fit_and_chunks_divide_them(
    chunks: int, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--training.local_batch_size=75", "--training.global_batch_size=900"]
    words = ["preflight", str(CONFIGS / "qwen3_70m.toml"), "--world=12", "--memory-gb=80", "--json"]
    assert main([*words, *options, f"--loss.num_chunks={chunks}"]) == status
    errors = json.loads(capsys.readouterr().out)["errors"]
    assert [line.partition(":")[0] for line in errors] == ["training.local_batch_size"] * status


# ------------------------------------------------------------------ figures


def test_one_rank_sends_nothing() -> None:
    assert report("debug_qwen3", 1)[STEP]["sent bytes"] == 0


def test_replicas_share_the_work_and_get_every_result() -> None:
    balanced = "--optimizer.muon.ownership=balanced"
    sharded = report("qwen3_0.6b", 16, balanced)[STEP]
    # Replicas of 2: an owner gathers half, keeps that half, and sends all else to the eight.
    replicas = "--parallelism.data_parallel_replicate_degree=8"
    pairs = report("qwen3_0.6b", 16, balanced, replicas)
    row, muon = pairs[STEP], elements(pairs, muon=True)
    assert row["GFLOP of the busiest"] == sharded["GFLOP of the busiest"]
    assert row["sent bytes"] == pytest.approx(8 * 2 * muon / 16, rel=1e-12)


def test_memory_is_that_of_state_and_of_logits_or_buffers() -> None:
    predicted = report("qwen3_1.7b", 32)
    muon, adamw = elements(predicted, muon=True), elements(predicted, muon=False)
    memory = predicted[MEMORY]
    assert memory["optimizer_state_bytes"] == pytest.approx((4 * muon + 8 * adamw) / 32, rel=1e-6)
    assert memory["parameters_bytes"] == pytest.approx(4 * (muon + adamw) / 32, rel=1e-6)
    lasting = sum(memory[f"{key}_bytes"] for key in ("parameters", "gradients", "optimizer_state"))
    assert memory["nccl_bytes"] == 7 * 470e6  # to the seven others of a node
    lasting += memory["nccl_bytes"]
    step = memory["exchange_bytes"] + memory["newton_schulz_bytes"]
    assert memory["at_most_bytes"] == lasting + max(memory["logits_bytes"], step)
    # Replicas multiply the buffers of the exchange.
    hybrid = report("qwen3_1.7b", 32, "--parallelism.data_parallel_replicate_degree=4")
    assert hybrid[MEMORY]["exchange_bytes"] > 2 * memory["exchange_bytes"]
    adamuon = report("qwen3_1.7b", 32, "--optimizer.name=AdaMuon")  # two values everywhere
    state = 8 * (muon + adamw) / 32
    assert adamuon[MEMORY]["optimizer_state_bytes"] == pytest.approx(state, rel=1e-6)
    assert predicted["run"]["checkpoint_bytes"] == 4 * (muon + adamw) + 4 * muon + 8 * adamw


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ("", [5] * 7),
        ("name=Muon muon.schedule=turbo", [4] * 7),
        ("name=Muon-Turbo", [4] * 7),
        ("name=ROOT", [5] * 7),
        (f"name=Muon muon.schedule_file={CONFIGS}/schedules/a1.toml", [5, 4, 5, 5, 4, 4, 4]),
    ],
)
def test_steps_are_those_of_the_optimizer(options: str, steps: list[int]) -> None:
    words = [f"--optimizer.{option}" for option in options.split()]
    assert [*report("qwen3_1.7b", 32, *words)["Newton-Schulz steps"].values()] == steps


def test_the_timeline() -> None:
    assert report("qwen3_1.7b", 32)["timeline"] == {
        "rate at its peak": 345,
        "first observation": 375,
        "last observation, plan": 3000,
        "locked": 3300,
        "end": 6912,
    }
