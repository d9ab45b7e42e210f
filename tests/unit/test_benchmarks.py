from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import device_work, launches, newton_schulz, spectra
from tests.simulated_device import simulated_device


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


@pytest.mark.slow
def test_a_step_on_devices_takes_few_launches(tmp_path: Path) -> None:
    output = tmp_path / "launches.json"
    launches.main(["--param-dtype", "bfloat16", "--output", str(output)])
    (row,) = json.loads(output.read_text())["rows"]
    # Of 255 parameters: one launch, or one view, for each would be more.
    assert row["operations"] < 250
    assert row["views"] < 75
    assert row["waits"] == 0


def test_work_of_a_device_is_counted_by_kind() -> None:
    work = device_work.Work()
    with simulated_device(), work.counting():
        x, y = torch.ones(4, 6, device="cuda"), torch.ones(4, 6, device="cuda")
        work.clear()
        x.add_(y)  # reads both and writes one
        narrow = x.to(torch.bfloat16)
        narrow.view(24)  # no kernel
        square = narrow @ narrow.mT
        del narrow

        @work.compile
        def fused() -> torch.Tensor:
            x.mul_(2).add_(y)
            return (x * y).to(torch.bfloat16)

        kept = fused()
    size = 4 * 6 * 4
    assert work.launches == {"pass": 3, "product": 1}
    assert work.flops == {torch.bfloat16: 2 * 4 * 6 * 4}
    assert work.bytes == 3 * size + 1.5 * size + 3.5 * size
    # The float32 product inside of the compiled function, its result, and the square before it.
    assert work.peak == 1.5 * size + square.numel() * 2
    assert kept.dtype == torch.bfloat16


@pytest.mark.slow
def test_work_of_a_step_is_told_beside_that_of_torch(tmp_path: Path) -> None:
    output = tmp_path / "work.json"
    arguments = ["--contenders", "ours", "torch Muon", "--narrower", "32", "--output", str(output)]
    assert device_work.main(arguments) == 0
    ours, peer = rows_of(output)
    # One rank of 32 does a 32nd of the products, and the busiest one somewhat more.
    share = float(str(ours["bfloat16 Tflop"])) / float(str(peer["bfloat16 Tflop"]))
    assert 1 / 40 < share < 1 / 20
    assert ours["waits"] == 0
    # Both ways, in two bytes.
    assert 3.5 < float(str(ours["sent B/element"])) < 4.5
