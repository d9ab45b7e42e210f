"""The preflight's Newton-Schulz steps are those of the optimizer that a config names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from amo_dist.schedule.budget import ns_step_flops
from tests.titan.test_preflight import CONFIGS, report
from torchtitan_ext.cli import main
from torchtitan_ext.tools import preflight_report
from torchtitan_ext.tools.command import plain_text

A1 = str(CONFIGS / "schedules" / "a1.toml")


@pytest.mark.parametrize(
    ("options", "steps", "origin"),
    [
        (("Muon",), [5] * 7, "schedule kj"),
        (
            ("Muon", f"--optimizer.muon.schedule_file={A1}"),
            [5, 4, 5, 5, 4, 4, 4],
            f"schedule file {A1}",
        ),
        (("Muon-Turbo",), [4] * 7, "schedule turbo of Muon-Turbo"),
        (("Muon-PE",), [5] * 7, "schedule pe of Muon-PE"),
        (("AdaMuon",), [5] * 7, "schedule kj of AdaMuon"),
        (("ROOT",), [5] * 7, "ROOT's triples, fitted to each shape"),
    ],
    ids=["kj", "file", "Muon-Turbo", "Muon-PE", "AdaMuon", "ROOT"],
)
def test_fixed_schedules_are_those_of_the_optimizer(
    options: tuple[str, ...], steps: list[int], origin: str
) -> None:
    kj, found = (
        report("qwen3_0.6b", 16, "", f"--optimizer.name={name}", *rest)
        for name, *rest in (("Muon",), options)
    )
    types = found["operator_types"].values()
    assert [one["steps_before"] for one in types] == steps
    assert [one["steps_after"] for one in types] == steps
    assert found["plan_origin"] == f"{origin}, the same all along"
    assert f"Newton-Schulz steps ({origin}" in text_of(found)
    # Flops in proportion to the steps, type by type; the owners are dealt without regard to them.
    shapes = {name: one["shapes"][0].split(" x ") for name, one in found["operator_types"].items()}
    flops = {name: ns_step_flops(int(m), int(n)) for name, (m, n) in shapes.items()}
    work = sum(k * flop for k, flop in zip(steps, flops.values(), strict=True))
    share = work / (5 * sum(flops.values()))
    gflop, of_kj = (one["step"]["before"]["gflop"]["mean"] for one in (found, kj))
    assert gflop == pytest.approx(share * of_kj, rel=1e-12)


def text_of(found: dict[str, Any]) -> str:
    found = {**found, "config": {**found["config"], "file": "x.toml"}}
    found = {**found, "world": {**found["world"], "memory_gb": 80.0}}
    return plain_text(preflight_report.parts_of(found))


def test_a_schedule_file_that_lacks_a_type_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s.toml"
    path.write_text(Path(A1).read_text().partition("[schedules.mlp_down]")[0])
    file = str(CONFIGS / "debug_qwen3.toml")
    options = ["--optimizer.name=Muon", f"--optimizer.muon.schedule_file={path}"]
    assert main(["preflight", file, "--world", "1", *options]) == 1
    assert "error: operator_type: found 'mlp_down', expected one with" in capsys.readouterr().out
