from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_trial, launches, newton_schulz, scale, step_picture
from tests.simulated_device import simulated_device


def test_newton_schulz_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "ns.json"
    arguments = ["--shapes", "128x256", "--dtypes", "float32", "--rounds", "1"]
    assert newton_schulz.main([*arguments, "--output", str(output)]) == 0
    content = json.loads(output.read_text())
    assert content["machine"]["cores"]
    assert [row["backend"].split()[0] for row in content["rows"]] == ["standard", "gram"]
    # float32's floor, several times over.
    assert all(row["error"] < 1e-4 for row in content["rows"])
    assert "effective %" in capsys.readouterr().out


def test_a_rank_of_many_runs_alone(tmp_path: Path) -> None:
    output = tmp_path / "scale.json"
    assert scale.main(["--cases", "1.7B:32", "1.7B:256", "--output", str(output)]) == 0
    few, many = json.loads(output.read_text())["rows"]
    assert few["greatest/mean, balanced"] < few["greatest/mean, round_robin"]
    assert many["construction s"] > 0
    # Ranks are listed twice in all, with four digits, a comma and a space at most.
    assert 0 < (many["text MB"] - few["text MB"]) * 1e6 < 2 * 6 * (256 - 32) + 1000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("params", "operations", "views", "num_bytes"),
    [("bfloat16", 560, 180, 170), ("master", 780, 300, 240)],
)
def test_a_step_on_devices_takes_few_launches(
    params: str, operations: int, views: int, num_bytes: float, tmp_path: Path
) -> None:
    output = tmp_path / "launches.json"
    launches.main(["--params", params, "--output", str(output)])
    (row,) = json.loads(output.read_text())["rows"]
    # Seven buckets of 255 parameters: one launch, or one view, for each parameter would be more.
    assert row["operations"] < operations
    assert row["views"] < views
    assert row["waits"] == 0
    assert row["bytes_per_element"] < num_bytes


def test_regions_of_columns_take_few_launches() -> None:
    device, _ = launches.count("float32", tp=8)
    # One for each of the matrices that tensor parallelism cuts by columns, there and back: four.
    assert device.operations["launches of copies"] <= 20


def test_the_picture_of_a_step_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    step_picture.draw(tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def test_the_trial_writes_what_each_part_found(tmp_path: Path) -> None:
    python = [sys.executable, "-c"]
    hangs = "import time; print('{\"is\": 1}'); print('a warning', flush=True); time.sleep(600)"
    commands = {
        "collectives": (600, gpu_trial.parts(tmp_path)["collectives"][1]),
        "no such part": (20, [*python, "raise SystemExit('the cause')"]),
        "hangs at its end": (2, [*python, hangs]),
    }
    assert gpu_trial.run_all(tmp_path, commands, 10_000) == 1
    results = json.loads((tmp_path / "trial.json").read_text())["parts"]
    assert [result["status"] for result in results.values()] == [0, 1, 124]
    assert results["collectives"]["figures"]["backend"] == "gloo"
    assert results["hangs at its end"]["figures"] == {"is": 1}
    rows = [line.split(" | ") for line in (tmp_path / "trial.md").read_text().splitlines()]
    found = {row[0].removeprefix("| "): (row[1], row[3]) for row in rows if len(row) == 4}
    assert found["no such part"] == ("FAILED", "the cause |")
    assert found["hangs at its end"] == ("took too long", "a warning |")
    assert gpu_trial.run_all(tmp_path, commands, seconds=0) == 1
    assert "| collectives | not run | 0 |  |" in (tmp_path / "trial.md").read_text()


@pytest.mark.slow
def test_every_part_of_the_trial_ends_on_a_cpu(tmp_path: Path) -> None:
    parts = gpu_trial.parts(tmp_path)
    gpu_trial.run_all(tmp_path, {name: (600, parts[name][1]) for name in parts}, 3600)
    results = json.loads((tmp_path / "trial.json").read_text())["parts"]
    # Tests that need CUDA are skipped, which pytest counts as none run.
    tails = {name: result["tail"] for name, result in results.items() if result["status"]}
    assert tails == {}, tails


# The simulation has no attention of PyTorch, and so no training; FSDP2 has tests of its own on it.
@pytest.mark.parametrize("part", [name for name in gpu_trial.OWN_PARTS if name != "training"])
def test_parts_of_the_trial_run_on_a_simulated_device(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_trial, "DEVICE", torch.device("cuda", 0))
    options = argparse.Namespace(schedule="types", optimizer="Muon", master=True, dion=None)
    with simulated_device():
        assert getattr(gpu_trial, part)(options)
