from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_trial, launches, newton_schulz, spectra


def rows_of(path: Path) -> list[dict[str, object]]:
    content = json.loads(path.read_text())
    assert content["machine"]["cores"]
    found: list[dict[str, object]] = content["rows"]
    return found


def test_newton_schulz_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "ns.json"
    arguments = ["--shapes", "128x256", "--dtypes", "float32", "--rounds", "1"]
    assert newton_schulz.main([*arguments, "--output", str(output)]) == 0
    rows = rows_of(output)
    assert [str(row["backend"]).split()[0] for row in rows] == ["standard", "gram"]
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
