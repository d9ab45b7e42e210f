"""The figures of the paper from the geometry log of a run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from amo_dist.config import OPERATOR_TYPES
from benchmarks.amo_paper import __main__ as paper
from benchmarks.amo_paper import figures


def geometry(step: int, layer: int, name: str, kappa: float) -> dict[str, Any]:
    sizes = {"kappa": kappa, "ns_residual": math.log10(kappa) / 10, "update_norm": 0.75}
    return {"step": step, "layer": layer, "operator_type": name, **sizes}


def geometry_log(num_layers: int = 8) -> list[dict[str, Any]]:
    """Kappa grows by type; deep layers overtake shallow ones at step 30."""
    return [
        geometry(step, layer, name, 10.0 ** (2 + i) * (1 + (layer if step >= 30 else -layer) / 100))
        for step in (10, 20, 30)
        for layer in range(num_layers)
        for i, name in enumerate(OPERATOR_TYPES)
    ]


def test_depth_takes_three_layers_and_never_one_twice() -> None:
    depth = figures.shallow_deep(geometry_log(), "attn_q")
    assert depth is not None
    assert (depth.num_layers, depth.crossing) == (3, 30)
    assert depth.shallow[0] == (10, pytest.approx(99.0))  # the median of layers 0, 1, 2
    assert depth.deep[0] == (10, pytest.approx(94.0))
    for num_layers, size in ((5, 2), (2, 1)):
        few = figures.shallow_deep(geometry_log(num_layers), "attn_q")
        assert few is not None
        assert few.num_layers == size
    assert figures.shallow_deep(geometry_log(1), "attn_q") is None


def test_the_figures_come_from_a_tracked_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    counts = dict.fromkeys(OPERATOR_TYPES, 5)
    metrics = [
        {"step": step, "phase": phase, "num_steps_by_type": counts}
        for step, phase in ((10, "observation"), (20, "observation"), (30, "locked"))
    ]
    for name, records in (("metrics", metrics), ("geometry", geometry_log())):
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    assert paper.main(["figures", str(tmp_path), "-o", str(tmp_path / "png")]) == 0
    names = ["f1", "f2", "f3_depth", "f3_steps", "f4_attn_q", "f4_mlp_up"]
    assert sorted(path.stem for path in (tmp_path / "png").iterdir()) == names
    assert "all r = 1.000" in capsys.readouterr().out
    (tmp_path / "geometry.jsonl").unlink()
    assert paper.main(["figures", str(tmp_path)]) == 2
