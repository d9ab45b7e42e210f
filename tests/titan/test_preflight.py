"""The preflight: all mistakes at once, figures that are those of the run, stated assumptions."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from amo_dist.schedule.budget import ns_step_flops
from torchtitan_ext.cli import main
from torchtitan_ext.config import checks, settings
from torchtitan_ext.tools.command import Mistakes
from torchtitan_ext.tools.preflight_prediction import predict

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
SPECS = json.loads((ROOT / "tests/golden/model_specs.json").read_text())
RUNS = json.loads((ROOT / "tests/golden/pretrain_runs.json").read_text())


@functools.cache
def report(name: str, world: int, plan: str = "", *overrides: str) -> dict[str, Any]:
    args = [f"--job.config_file={CONFIGS / f'{name}.toml'}", *overrides]
    config, problems = checks.validate_config(settings.load(args), world)
    predicted = predict(config, world, 8, plan, problems)
    assert problems == []
    return predicted


# ------------------------------------------------------------------ mistakes

BROKEN = """
[model]
name = "qwen3"
flavor = "Qwen3-9B"

[training]
steps = 100
local_batch_size = 3
global_batch_size = 10

[dataloader]
dataset = "stdlib"

[optimizer]
name = "AMO"
lr = -1.0

[lr_scheduler]
warmup_steps = 500

[checkpoint]
enable = true
"""


def test_every_mistake_is_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "broken.toml"
    path.write_text(BROKEN)
    assert main(["preflight", str(path), "--world", "4"]) == 1
    lines = capsys.readouterr().out.splitlines()
    expected = [
        "optimizer.lr: found -1.0, expected a finite number >= 0",
        "training.steps: found 100, expected at least observe_until + transition_steps = 1500",
        "model.flavor: found 'Qwen3-9B'",
        "training.global_batch_size: found 10, expected a multiple of 12",
        "lr_scheduler.warmup_steps: found 500, expected at most the 100 steps",
    ]
    errors = lines[-len(expected) :]
    for one in expected:
        assert sum(line.startswith(f"error: {one}") for line in errors) == 1, one
    assert lines[0] == f"Qwen3-9B with AMO: {path} has 5 mistakes, listed at the end"


def test_a_mistake_hides_nothing_that_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(CONFIGS / "debug_llama3.toml")
    options = ["--training.seq_len=0", "--tokenizer.kind=hf", "--hf_assets_path=gone"]
    assert main(["preflight", file, "--world", "2", *options]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "layers.*.attention.qkv_linear.wq.weight" in "\n".join(lines)
    assert [line.partition(":")[2].partition(":")[0] for line in lines[-2:]] == [
        " training.seq_len",
        " hf_assets_path",
    ]
    assert not any(line.startswith("error") for line in lines[:-2])


def test_a_world_beyond_this_machine_lacks_nothing_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torchtitan_ext.plugin.machine.num_gpus", lambda: 8)
    monkeypatch.setattr("torchtitan_ext.plugin.machine.gpu_memory_gb", lambda: 80.0)
    monkeypatch.setattr("torchtitan_ext.tools.preflight_here._why_no_hub", lambda: None)
    line = ["preflight", str(CONFIGS / "qwen3_1.7b.toml")]
    assert main([*line, "--world", "32"]) == 0
    assert "note: on this machine: hf_assets_path: found no tok" in capsys.readouterr().out
    for options in (["--world", "32", "--no-elsewhere"], ["--world", "8"]):
        assert main([*line, *options]) == 1
        assert "error: hf_assets_path: found no tok" in capsys.readouterr().out


def test_balanced_owners_are_recommended_where_they_save_five_percent() -> None:
    def notes(*options: str) -> list[str]:
        return [note for note in report("qwen3_1.7b", 32, "", *options)["notes"] if "busi" in note]

    (note,) = notes()
    assert note.startswith(
        "the busiest rank does 1.14 times the mean of Newton-Schulz work, and 1.0"
    )
    assert notes("--optimizer.muon.ownership=balanced") == []
    assert report("debug_llama3", 1)["notes"] == []


def test_a_world_that_the_degrees_do_not_make(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(CONFIGS / "qwen3_0.6b.toml")
    status = main(["preflight", file, "--world", "16", "--parallelism.tensor_parallel_degree", "3"])
    assert status == 1
    assert "tp 3 * pp 1, expected a product of 16 ranks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "the following arguments are required: FILE"),
        (["no.toml"], "cannot read no.toml"),
        (["llama3.1_75m"], "'llama3.1_75m', expected a TOML file; those of the project lie in"),
        (["x.toml", "--world", "0"], "--world: found 0"),
        (["x.toml", "--gpus-per-node", "-1"], "--gpus-per-node: found -1"),
        (["x.toml", "--memory-gb", "0"], "--memory-gb: found 0.0, expected a number > 0"),
    ],
)
def test_mistakes_among_the_arguments(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["preflight", *arguments]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("plan", ["attn_q", "attn_q=0", "router=3", "attn_q=5;mlp_up=5"])
def test_a_malformed_plan(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(CONFIGS / "qwen3_70m.toml")
    assert main(["preflight", file, "--world", "6", "--plan", plan]) == 1
    assert "error: --plan: found" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("family", ["muon", "adamw"])
@pytest.mark.parametrize("model", SPECS)
def test_the_papers_configs_are_in_order(model: str, family: str) -> None:
    name = model.lower().replace("llama-", "llama").replace("-", "_")
    run = RUNS[family][model]
    found = report(name + ("_adamw_paper" if family == "adamw" else ""), run["gpus"])
    assert found["parameters"]["total"] == SPECS[model]["total_params"]
    assert found["run"]["accumulation"] == run["grad_accum"]
    assert found["run"]["tokens"] == pytest.approx(run["tokens_b"] * 1e9, abs=0.025e9)
    if family == "adamw":
        assert found["parameters"]["muon"] == 0
        assert "step" not in found


# ------------------------------------------------------------------ figures


def test_one_rank_sends_nothing_and_owns_all() -> None:
    found = report("debug_qwen3", 1)
    step = found["step"]["before"]
    assert step["sent_within"]["most"] == step["sent_across"]["most"] == 0
    assert step["owners"] == 1
    flops = sum(
        5 * ns_step_flops(*one["shape"])
        for one in found["parameters"]["by_name"].values()
        if one["optimizer"] == "muon"
    )
    assert step["gflop"]["most"] == pytest.approx(flops / 1e9, rel=1e-12)


def test_replicas_share_the_work_under_hsdp() -> None:
    sharded = report("qwen3_0.6b", 16)
    hybrid = report("qwen3_0.6b", 16, "", "--parallelism.data_parallel_replicate_degree=2")
    assert hybrid["step"]["before"]["gflop"] == sharded["step"]["before"]["gflop"]
    # Results go to both replicas, and the other one is another node.
    assert (
        hybrid["step"]["before"]["sent_across"]["mean"]
        > hybrid["step"]["before"]["sent_within"]["mean"] / 2
    )
    # Replicas of 2: four of the eight lie on the other node, and each gets every element.
    pairs = report("qwen3_0.6b", 16, "", "--parallelism.data_parallel_replicate_degree=8")
    across = pairs["step"]["before"]["sent_across"]["mean"]
    assert across == pytest.approx(4 * 2 * pairs["parameters"]["muon"] / 16, rel=1e-12)
    ratio = hybrid["memory"]["optimizer_state"] / sharded["memory"]["optimizer_state"]
    assert ratio == pytest.approx(2, rel=0.01)  # norms of 128 rows split unevenly on neither


def test_memory_of_the_state() -> None:
    found = report("qwen3_1.7b", 32)
    parameters = found["parameters"]
    state = (4 * parameters["muon"] + 8 * parameters["adamw"]) / 32
    assert found["memory"]["optimizer_state"] == pytest.approx(state, rel=1e-6)
    assert found["memory"]["parameters"] == pytest.approx(4 * parameters["total"] / 32, rel=1e-6)
    adamuon = report("qwen3_1.7b", 32, "", "--optimizer.name=AdaMuon")  # two values everywhere
    state = 8 * parameters["total"] / 32
    assert adamuon["memory"]["optimizer_state"] == pytest.approx(state, rel=1e-6)
    size = 4 * parameters["total"] + 4 * parameters["muon"] + 8 * parameters["adamw"]
    assert found["run"]["checkpoint_bytes"] == size


def test_the_plan_of_the_paper_a_given_one_and_none() -> None:
    paper = report("qwen3_1.7b", 32)
    steps = [one["steps_after"] for one in paper["operator_types"].values()]
    assert steps == [6, 5, 5, 6, 4, 5, 4]
    given = report("qwen3_1.7b", 32, "mlp_down=7, attn_q=3")
    assert given["operator_types"]["mlp_down"]["steps_after"] == 7
    assert given["operator_types"]["attn_k"]["steps_after"] == 5
    assert given["step"]["after"]["gflop"]["most"] > paper["step"]["after"]["gflop"]["most"]
    unknown = report("qwen3_70m", 6)
    assert {one["steps_after"] for one in unknown["operator_types"].values()} == {5}
    assert "comes during the run" in unknown["plan_origin"]
    # A config that plans otherwise than the paper does not get the paper's plan.
    other = report("qwen3_1.7b", 32, "", "--optimizer.amo.planner=measured")
    assert {one["steps_after"] for one in other["operator_types"].values()} == {5}
    assert "comes during the run" in other["plan_origin"]


def test_a_fixed_schedule_has_no_lock_and_no_observation() -> None:
    found = report("qwen3_70m", 6, "", "--optimizer.name=Muon", "--optimizer.muon.schedule=turbo")
    assert {one["steps_before"] for one in found["operator_types"].values()} == {4}
    assert found["step"]["before"] == found["step"]["after"]
    assert "observation" not in found
    assert not any("locked" in one["event"] for one in found["timeline"])


def test_the_timeline() -> None:
    steps = {one["event"]: one["step"] for one in report("qwen3_1.7b", 32)["timeline"]}
    assert steps == {
        "the rate reaches its peak": 345,
        "cosine decay starts": 346,
        "first observation, then every 375 steps": 375,
        "last observation, and the plan": 3000,
        "transition starts": 3001,
        "locked": 3300,
        "the run ends": 6912,
    }


def test_the_timeline_of_a_run_without_a_plan() -> None:
    found = report("qwen3_1.7b", 32, "", "--optimizer.amo.observe_only")
    steps = {one["event"]: one["step"] for one in found["timeline"]}
    assert steps["last observation; the uniform schedule stays"] == 3000
    assert not any("lock" in event or "transition" in event for event in steps)


# ------------------------------------------------------------------ text


def test_the_text_tells_figures_and_no_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(CONFIGS / "qwen3_1.7b.toml")
    assert main(["preflight", file, "--world", "32", "--elsewhere"]) == 0
    text = capsys.readouterr().out
    for one in (
        "1,720,574,976",
        "layers.*.attention.qkv_linear.wq.weight",
        "attn_q",
        "tok_embeddings.weight",
        "33.97 billion tokens",
        "locked: 1.143 by round_robin, 1.015 by balanced",
        "an observation: 56 matrices",
        "of 80.00 GB",
    ):
        assert one in text, one
    # Nobody has measured any.
    assert not re.search(r"\b(seconds?|ms|hours?)\b|\d s\b", text)


def test_json_and_text_are_of_one_report(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(CONFIGS / "debug_llama3.toml")
    assert main(["preflight", file, "--world", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["world"]["ranks"] == 2
    assert found["problems"] == []
    assert found["world"]["memory_gb"] is None  # of no GPU, where the run starts on CPUs


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        *(("optimizer.lr", lr, "a finite number >= 0") for lr in ("nan", "inf", "-1")),
        ("optimizer.beta2", "1.0", "a number >= 0 and < 1"),
        ("parallelism.tensor_parallel_degree", "0", "an integer >= 1"),
        ("parallelism.data_parallel_shard_degree", "0", "an integer >= 1, or -1 for all remaining"),
        ("training.steps", "9" * 400, "an integer >= 1 and <= 1000000000000000"),
    ],
)
def test_a_number_that_cannot_be_is_named(field: str, value: str, expected: str) -> None:
    file = CONFIGS / "debug_llama3.toml"
    config = settings.load([f"--job.config_file={file}", f"--{field}={value}"])
    _, (found,) = checks.validate_config(config, 4)
    assert found.startswith(f"{field}: found ")
    assert f"expected {expected}" in found
    with pytest.raises(Mistakes, match=f"{field}: found"):  # `train` stops there, too
        settings.complete(config)


def test_a_baseline_needs_no_operator_types() -> None:
    # AdamW asks for none, and a fused projection has a name that only its module explains.
    options = ("--model.fuse_qkv", "--optimizer.name=AdamW")
    assert report("debug_llama3", 2, "", *options)["memory"]["optimizer_state"] > 0
