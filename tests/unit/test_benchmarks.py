from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from amo_dist.schedule.budget import ns_step_flops
from amo_dist.tools.simulate import OWNERSHIPS, simulate
from benchmarks import bfloat16_params, launches, newton_schulz, optimizer_step, overhead, spectra
from benchmarks.measure import paired, ratio, report, table
from benchmarks.shapes import ELL_BY_TYPE, MODELS

# Millions of elements in matrices, as the AMO paper counts them.
MATRIX_MILLIONS = {
    "Qwen3-70M": 31.46,
    "Qwen3-300M": 204.47,
    "Qwen3-0.6B": 440.40,
    "Qwen3-1.7B": 1409.29,
    "Llama-3.1-75M": 9.04,
    "Llama-3.1-480M": 218.10,
    "Llama-3.1-760M": 368.05,
    "Llama-3.1-1.4B": 872.42,
}


@pytest.mark.parametrize("name", MODELS)
def test_shapes_are_those_of_the_paper(name: str) -> None:
    # Printed to two decimals.
    num_elements = sum(
        rows * columns for rows, columns in (m.shape for m in MODELS[name].matrices())
    )
    assert num_elements / 1e6 == pytest.approx(MATRIX_MILLIONS[name], abs=0.005)


@pytest.mark.parametrize("name", ["Qwen3-70M", "Llama-3.1-1.4B"])
@pytest.mark.parametrize(("scale", "is_reversed"), [(0.01, False), (1.0, True), (30.0, False)])
def test_a_locked_step_costs_no_more_flops_than_a_uniform_one(
    name: str, scale: float, is_reversed: bool
) -> None:
    registry = MODELS[name].matrices()
    values = list(ELL_BY_TYPE.values())
    ells = dict(zip(ELL_BY_TYPE, reversed(values) if is_reversed else values, strict=True))
    targets = {kind: min(1.0, scale * ell) for kind, ell in ells.items()}
    schedules = optimizer_step.within_flops(targets, registry)
    uniform = sum(5 * ns_step_flops(*info.shape) for info in registry)
    locked = sum(
        schedules[info.operator_type].num_steps * ns_step_flops(*info.shape) for info in registry
    )
    assert locked <= uniform
    # The plan differs from the uniform one: the test is not of 5 against 5.
    assert {schedule.num_steps for schedule in schedules.values()} != {5}


def test_contenders_take_turns() -> None:
    calls: list[str] = []
    seconds = paired({name: lambda name=name: calls.append(name) for name in "ab"}, 3, warmup=2)
    assert calls == ["a", "b"] * 5
    assert {name: len(each) for name, each in seconds.items()} == {"a": 3, "b": 3}


def test_ratio_is_the_median_within_rounds() -> None:
    # The second round is slow for both, and does not count against one of them.
    seconds = {"a": [1.0, 50.0, 2.0], "b": [2.0, 100.0, 4.0]}
    assert ratio(seconds, "a", "b") == 0.5


def test_table_aligns() -> None:
    lines = table([{"name": "x", "value": 1.23456}, {"name": "long", "value": 2}]).splitlines()
    assert lines[1] == "   x   1.23"
    assert len({len(line) for line in lines}) == 1
    assert table([]) == ""


def rows_of(path: Path) -> list[dict[str, object]]:
    content = json.loads(path.read_text())
    assert content["machine"]["cores"]
    found: list[dict[str, object]] = content["rows"]
    return found


def test_newton_schulz_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "ns.json"
    threads = torch.get_num_threads()
    arguments = ["--shapes", "128x256", "--dtypes", "float32", "--rounds", "1"]
    assert newton_schulz.main([*arguments, "--threads", str(threads), "--output", str(output)]) == 0
    rows = rows_of(output)
    assert [str(row["backend"]).split()[0] for row in rows] == [
        "standard",
        "gram",
    ]
    # float32's floor, several times over.
    assert all(float(str(row["error"])) < 1e-4 for row in rows)
    assert "effective %" in capsys.readouterr().out


def test_errors_by_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, study = tmp_path / "dtypes.json", tmp_path / "study"
    study.mkdir()
    sigma = torch.logspace(0, -3, 24)
    torch.save({"observed": {}, "later": {3: {"wq": sigma}}}, study / "run.pt")
    monkeypatch.setattr(spectra, "ERROR_SHAPES", ((24, 32),))
    arguments = ["--dtypes", "--study", str(study), "--output", str(output)]
    assert spectra.main(arguments) == 0
    rows = {(row["matrices"], row["ns_dtype"], row["wire_dtype"]): row for row in rows_of(output)}
    assert len(rows) == 6 * len(spectra.DTYPES)
    for kind in ("decaying", "study", "graded rows"):
        exact, wide, narrow = (
            rows[kind, ns_dtype, "float32"]["mean"]
            for ns_dtype in ("float32", "float16", "bfloat16")
        )
        assert exact < 1e-3 < narrow
        assert exact < wide < narrow


def test_spectra_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "spectra.json"
    monkeypatch.setattr(spectra, "ERROR_SHAPES", ((140, 140), (132, 150)))
    threads = str(torch.get_num_threads())
    arguments = ["--model", "Llama-3.1-75M", "--threads", threads, "--output", str(output)]
    assert spectra.main(arguments) == 0
    errors = rows_of(tmp_path / "spectra_errors.json")
    # The promises of the method; its rivals may fail.
    assert {row["ell"] is None for row in errors if row["spectrum"] == "deficient"} == {True}
    for row in errors:
        assert row["ell"] is None or float(str(row["ell"])) < 1e-3
        if float(str(row["kappa"])) <= 1e6:
            assert float(str(row["residual"])) < 1e-6
            assert float(str(row["distance"])) < 1e-6
    times = rows_of(output)
    # Eight of each of seven types.
    assert times[-1]["matrices"] == 56
    assert spectra.trials().shape == (205, 7, 3)


def test_overhead_runs(tmp_path: Path) -> None:
    output = tmp_path / "overhead.json"
    threads = str(torch.get_num_threads())
    arguments = ["--model", "Llama-3.1-75M", "--transition-steps", "3", "--steps", "1"]
    assert overhead.main([*arguments, "--threads", threads, "--output", str(output)]) == 0
    whats = [row["what"] for row in rows_of(output)]
    assert whats[:2] == ["step", "plan, once"]
    assert whats[-1].startswith("observation")


def test_bfloat16_params_runs(tmp_path: Path) -> None:
    output = tmp_path / "found.json"
    assert bfloat16_params.main(["--steps", "2", "--seeds", "0", "--output", str(output)]) == 0
    rows = rows_of(output)
    assert [row["way"] for row in rows] == ["master", "stochastic", "nearest"]
    assert rows[0]["drift"] == 0
    assert all(row["drift"] > 0 for row in rows[1:])


@pytest.mark.parametrize("ownership", OWNERSHIPS)
def test_the_busiest_rank_owns_what_the_simulation_says(ownership: str) -> None:
    registry = MODELS["Qwen3-1.7B"].matrices()
    owned = newton_schulz.owned_batches("Qwen3-1.7B", 32, steps=5, ownership=ownership, itemsize=2)
    simulated = simulate(registry, dict.fromkeys(ELL_BY_TYPE, 5), 32)
    (load,) = {row["gflop"]["most"] for row in simulated if row["ownership"] == ownership}
    found = sum(count * 5 * ns_step_flops(*shape) for count, shape in owned)
    assert found == pytest.approx(load * 1e9, rel=1e-12)
    # In buckets as the optimizer fills them, of which the largest matrices take two.
    assert all(2 * count * rows * columns <= 64 * 2**20 for count, (rows, columns) in owned)
    assert max(count for count, _ in owned) > 1


def test_the_matrices_of_a_rank_run(tmp_path: Path) -> None:
    output = tmp_path / "owned.json"
    threads = torch.get_num_threads()
    arguments = ["--owned-by-rank-of", "32", "--model", "Llama-3.1-75M", "--dtypes", "float32"]
    arguments += ["--steps", "2", "--rounds", "1", "--device", "cpu", "--threads", str(threads)]
    assert newton_schulz.main([*arguments, "--output", str(output)]) == 0
    rows = rows_of(output)
    assert [row["backend"] for row in rows] == ["standard", "auto"]
    assert {row["matrices"] for row in rows} == {3}  # 84 matrices on 32 ranks
    assert rows[0]["effective %"] == rows[0]["executed %"]


def test_bytes_are_counted(run_on) -> None:  # type: ignore[no-untyped-def]
    assert run_on(2)(count_some) == [8 * 4 + 3 * 4 + 5 * 4, 4 * 4 + 3 * 4 + 5 * 4]


def count_some(rank: int, world: int) -> float:
    """Rank 0 sends 8 floats of its 10 to the other, rank 1 sends 4 of 7; then both share."""
    sizes = [[2, 8], [4, 3]]
    with optimizer_step.count_bytes() as counted:
        sent = torch.zeros(sum(sizes[rank]))
        received = torch.zeros(sizes[0][rank] + sizes[1][rank])
        splits = [sizes[0][rank], sizes[1][rank]]
        dist.all_to_all_single(received, sent, splits, sizes[rank])
        dist.all_gather([torch.zeros(3), torch.zeros(3)], torch.zeros(3))
        dist.all_reduce(torch.zeros(5))  # 2 (W - 1) / W of it
    assert dist.all_reduce.__name__ == "all_reduce"
    return counted["bytes"]


@pytest.mark.slow
def test_optimizer_step_runs(tmp_path: Path) -> None:
    output = tmp_path / "step.json"
    arguments = ["--models", "Llama-3.1-75M", "--layers", "1", "--ranks", "2", "--rounds", "1"]
    arguments += ["--ours", "ours locked", "--peers", "AdamW", "torch Muon"]
    assert optimizer_step.main([*arguments, "--output", str(output)]) == 0
    against_adamw, against_torch = rows_of(output)
    assert float(str(against_adamw["ours bytes"])) > 0
    assert against_adamw["peer bytes"] == 0
    assert against_torch["ratio"] == "one process only"


def test_results_hold_null_where_a_number_is_not_finite(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    report("found", [{"error": math.nan, "ms": 1.5, "count": 2}], path)
    assert json.loads(path.read_text())["rows"] == [{"error": None, "ms": 1.5, "count": 2}]


def test_a_step_on_devices_takes_few_launches(tmp_path: Path) -> None:
    output = tmp_path / "launches.json"
    launches.main(["--param-dtype", "bfloat16", "--output", str(output)])
    (row,) = json.loads(output.read_text())["rows"]
    # Of 255 parameters: one launch, or one view, for each would be more.
    assert row["operations"] < 280
    assert row["views"] < 75
    assert row["waits"] == 0
