"""The simulation: known shapes, known volumes, a table and JSON."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from amo_dist.config import OPERATOR_TYPES
from amo_dist.schedule.budget import ns_step_flops
from amo_dist.tools.cli import main
from amo_dist.tools.shapes import MODELS, PLANS, DecoderShape
from amo_dist.tools.simulate import Row, simulate

SPECS = json.loads(
    (Path(__file__).resolve().parent.parent / "golden" / "model_specs.json").read_text()
)
LOCKED = json.loads(
    (Path(__file__).resolve().parent.parent / "golden" / "locked_schedules.json").read_text()
)
SMALL = DecoderShape(layers=4, dim=64, ffn_dim=128, heads=4, kv_heads=2)
UNIFORM = dict.fromkeys(OPERATOR_TYPES, 5)


def rows_of(results: list[Row]) -> dict[tuple[str, str], Row]:
    return {(row["ownership"], row["schedule"]): row for row in results}


@pytest.mark.parametrize("name", sorted(SPECS))
def test_shapes_and_steps_are_the_papers(name: str) -> None:
    shape, spec = MODELS[name], SPECS[name]
    assert dataclasses.asdict(shape) == {key: spec[key] for key in dataclasses.asdict(shape)}
    elements = sum(info.shape[0] * info.shape[1] for info in shape.matrices())
    assert round(elements / 1e6, 2) == spec["muon_params_m"]
    locked = LOCKED.get(name)
    assert (name in PLANS) == bool(locked)
    if locked:
        assert PLANS[name] == tuple(locked[kind]["steps"] for kind in OPERATOR_TYPES)


@pytest.mark.parametrize("layout", ["fsdp", "hsdp"])
@pytest.mark.parametrize("ranks", [8, 32])
def test_load_and_traffic_add_up(layout: str, ranks: int) -> None:
    registry = SMALL.matrices()
    elements = sum(info.shape[0] * info.shape[1] for info in registry)
    flops = sum(ns_step_flops(*info.shape) for info in registry)
    steps = {**UNIFORM, "attn_q": 7}
    for row in simulate(registry, steps, ranks, layout=layout):
        extra = sum(ns_step_flops(*i.shape) for i in registry if i.operator_type == "attn_q")
        locked = row["schedule"] == "locked"
        assert row["load"]["mean"] == (5 * flops + 2 * extra * locked) / ranks
        assert row["load"]["greatest"] >= row["load"]["mean"]
        shard = ranks if layout == "fsdp" else 8
        # An owner gathers what it does not hold, and delivers to every replica but itself.
        moved = (1 - 1 / shard) + (ranks / shard - 1 / shard)
        assert row["traffic"]["mean"] == pytest.approx(2 * elements * moved / ranks, rel=1e-12)
        assert row["traffic"]["greatest"] >= row["traffic"]["mean"] >= row["traffic"]["mean_across"]
        assert row["traffic"]["greatest_across"] <= row["traffic"]["greatest"]


def test_balanced_is_never_worse() -> None:
    found = rows_of(simulate(SMALL.matrices(), {**UNIFORM, "mlp_up": 7}, 8))
    for schedule in ("uniform", "locked"):
        balanced, dealt = (found[name, schedule]["load"] for name in ("balanced", "round_robin"))
        assert balanced["greatest"] <= dealt["greatest"]
        assert balanced["mean"] == dealt["mean"]


def test_one_node_sends_nothing_across() -> None:
    for row in simulate(SMALL.matrices(), UNIFORM, 8):
        assert row["traffic"]["mean_across"] == row["traffic"]["greatest_across"] == 0
        assert row["traffic"]["mean"] > 0


def test_owners_in_each_replica_send_nothing_across_nodes() -> None:
    results = simulate(SMALL.matrices(), UNIFORM, 32, layout="hsdp", owners="replica")
    assert {row["traffic"]["greatest_across"] for row in results} == {0}
    # All four replicas do all the work.
    (mean,) = {row["load"]["mean"] for row in results}
    assert mean == simulate(SMALL.matrices(), UNIFORM, 8)[0]["load"]["mean"]


@pytest.mark.parametrize(
    ("layout", "ranks", "share"),
    [("hsdp", 256, 4), ("hsdp", 1024, 4), ("ddp", 256, 8), ("ddp", 1024, 8)],
)
def test_relays_send_across_nodes_once(layout: str, ranks: int, share: int) -> None:
    """Replicas of 2 ranks, or of 1, on nodes of 8."""
    for row in simulate(SMALL.matrices(), UNIFORM, ranks, layout=layout, replica_size=2):
        traffic = row["traffic"]
        assert share * traffic["mean_across"] == traffic["mean_direct"] > 0
        assert share * traffic["greatest_across"] == traffic["greatest_direct"]
        # Of all copies but its own an owner sends some, and relays the others.
        elements = sum(info.shape[0] * info.shape[1] for info in SMALL.matrices())
        copies = ranks - 1 if layout == "ddp" else ranks // 2
        assert traffic["mean"] == pytest.approx(2 * elements * copies / ranks, rel=1e-12)


def test_one_rank_sends_nothing() -> None:
    (row, *_) = simulate(SMALL.matrices(), UNIFORM, 1)
    assert row["traffic"]["greatest"] == 0
    assert row["load"]["greatest"] == row["load"]["mean"]


def test_a_thousand_ranks_plan_every_matrix_once() -> None:
    shape = MODELS["Qwen3-1.7B"]
    steps = dict(zip(OPERATOR_TYPES, PLANS["Qwen3-1.7B"], strict=True))
    found = rows_of(simulate(shape.matrices(), steps, 1024, layout="hsdp"))
    elements = sum(info.shape[0] * info.shape[1] for info in shape.matrices())
    row = found["round_robin", "locked"]
    assert row["traffic"]["mean"] == 2 * elements * (7 / 8 + 128 - 1 / 8) / 1024
    # More ranks than matrices: the largest job is the greatest load.
    largest = max(steps[i.operator_type] * ns_step_flops(*i.shape) for i in shape.matrices())
    assert row["load"]["greatest"] == largest


def test_the_table_has_a_row_for_each_world_ownership_and_schedule(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["simulate", "--model", "llama-3.1-760m", "--ranks", "8", "16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "llama-3.1-760m, fsdp, owners: mesh, nodes of 8" in lines[0]
    assert "attn_q 6, attn_k 4" in lines[1]
    assert [line.split()[0] for line in lines[6:]] == ["8"] * 4 + ["16"] * 4
    assert len({len(line) for line in lines[5:]}) == 1


def test_json_holds_the_settings_and_the_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "shape.json"
    file.write_text(json.dumps(dataclasses.asdict(SMALL)))
    arguments = ["simulate", "--shapes", str(file), "--ranks", "16", "--layout", "hsdp"]
    assert main([*arguments, "--steps", "attn_q=7", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["shape"] == dataclasses.asdict(SMALL)
    assert found["steps"] == {**UNIFORM, "attn_q": 7}
    expected = simulate(SMALL.matrices(), {**UNIFORM, "attn_q": 7}, 16, layout="hsdp")
    assert found["rows"] == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "qwen3-1.7b", "--ranks", "0"], "ranks: found 0"),
        (
            ["--model", "qwen3-1.7b", "--ranks", "12", "--layout", "hsdp"],
            "replica_size: found 8, expected a divisor of 12 ranks",
        ),
        (["--model", "qwen3-1.7b", "--steps", "attn_q"], "--steps: found 'attn_q'"),
        (["--model", "qwen3-1.7b", "--steps", "attn_x=3"], "--steps: found 'attn_x=3'"),
        (["--model", "qwen3-1.7b", "--steps", "attn_q=0"], "--steps: found 'attn_q=0'"),
        (["--shapes", "missing.json"], "--shapes: found missing.json: cannot be read"),
    ],
)
def test_mistakes_are_told_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("text", ["[]", "{", '{"layers": 1}', '{"depth": 1}'])
def test_a_malformed_shape_names_the_file(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "shape.json"
    file.write_text(text)
    assert main(["simulate", "--shapes", str(file)]) == 2
    assert f"--shapes: found {file}" in capsys.readouterr().err


def test_bad_sizes_name_the_field() -> None:
    with pytest.raises(ValueError, match="layers: found 0"):
        dataclasses.replace(SMALL, layers=0)
    with pytest.raises(ValueError, match="q_ratio: found"):
        dataclasses.replace(SMALL, q_ratio=0.33)


def test_teams_have_rows_and_columns_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", "--model", "qwen3-1.7b", "--ranks", "256"]
    assert main([*arguments, "--max-team", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "owners: mesh, teams of at most 8" in lines[0]
    assert {"teams", "max/whole"} <= {*lines[5].replace("  ", "\0").split("\0")}
    assert ["84 of 2" in line for line in lines[6:]] == [False] * 4 + [True] * 4
    assert main([*arguments, "--max-team", "0"]) == 2
    assert "--max-team: found 0" in capsys.readouterr().err
