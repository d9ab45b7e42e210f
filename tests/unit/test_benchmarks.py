from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_trial, launches, newton_schulz, scale


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


def test_the_gpu_trial_runs_small_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = {"no such part": (20, [sys.executable, "-c", "raise SystemExit(3)"])}
    all_parts = gpu_trial.parts(tmp_path)
    names = ("collectives", "step, master weights", "observation")
    few = {name: all_parts[name] for name in names}
    monkeypatch.setattr(gpu_trial, "parts", lambda folder: few | fails)
    assert gpu_trial.run_all(tmp_path, None) == 1
    results = json.loads((tmp_path / "trial.json").read_text())["parts"]
    assert [result["status"] for result in results.values()] == [0, 0, 0, 3]
    page = (tmp_path / "trial.md").read_text()
    assert "| no such part | FAILED |" in page
    assert "ms of the host, median" in page
