"""The report: numbers of its table, and a page that stands alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from amo_dist.config import OPERATOR_TYPES
from torchtitan_ext.cli import main
from torchtitan_ext.tools.report import command, data, figures

pytest.importorskip("matplotlib")


def metric(step: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 5.0 - 0.01 * step,
        "lr": 1e-3,
        "grad_norm": 1.0,
        "num_tokens": 100 * step,
        "tokens_per_second": 50.0,
        "phase": "observation" if step <= 20 else "locked",
        "lock_step": 21,
        "num_steps_by_type": dict.fromkeys(OPERATOR_TYPES, 5),
        "optimizer": {},
        **changes,
    }


def write_run(folder: Path, metrics: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in metrics))
    return folder


def test_the_table_has_the_last_numbers_of_each_run(tmp_path: Path) -> None:
    residuals = {10: 0.25, 20: 0.125, 30: 0.0}  # 0 is no measurement, as after a resume
    metrics = [metric(k, optimizer={"newton_schulz/residual": x}) for k, x in residuals.items()]
    metrics[-1] |= {"training_steps": 40, "grad_norm": 2.5, "tokens_per_second": 70.0}
    first = write_run(tmp_path / "a", metrics)
    bare = metric(10, phase="", num_steps_by_type={}, grad_norm=None, loss=None)
    rows = {
        row[0]: row[1:]
        for row in command.facts([data.load(first), data.load(write_run(tmp_path / "b", [bare]))])
    }
    none = command.NONE
    assert rows["steps"] == ["30 of 40", "10"]
    assert rows["loss"] == ["4.7", none]
    assert rows["gradient norm"] == ["2.5", none]
    assert rows["tokens per second, median"] == ["50", "50"]
    assert rows["residual after Newton-Schulz"] == ["0.125", none]
    assert rows["locked at step"] == ["21", none]
    assert "validation loss" not in rows


@pytest.mark.slow
def test_the_page_opens_offline_and_shows_what_runs_have(tmp_path: Path) -> None:
    metrics = [metric(10), metric(20), metric(30)]
    metrics[-1]["num_steps_by_type"] = {**metrics[0]["num_steps_by_type"], "attn_q": 6}
    first = write_run(tmp_path / "a&b" / "run", metrics)
    second = write_run(tmp_path / "x" / "run", [metric(10, num_steps_by_type={}, phase="")])
    output = tmp_path / "out" / "report.html"
    assert main(["report", str(first), str(second), "-o", str(output)]) == 0
    page = output.read_text("utf-8")
    assert not re.search("<(script|link)", page)
    sources = re.findall(r'(?:src|href)="(.*?)"', page)
    assert all(source.startswith("data:image/") for source in sources)
    assert len(sources) == 2  # training, and schedule of the first
    assert "a&amp;b/run<" in page
    assert "x/run<" in page


def test_bars_and_lines_are_those_of_the_records(tmp_path: Path) -> None:
    metrics = [metric(step, lr=1e-6 * step) for step in (1, 20, 30)]
    metrics[-1]["num_steps_by_type"] = dict.fromkeys(OPERATOR_TYPES, 2)
    run = data.load(write_run(tmp_path / "run", metrics))
    with figures.style():
        rates = figures.training([run]).axes[1]
        assert rates.lines[0].get_xydata().tolist() == [[s, 1e-6 * s] for s in (1, 20, 30)]
        (bars,) = figures.schedule(run).axes
        widths = sorted({bar.get_width() for bar in bars.patches if bar.get_height() == 0.9})
        assert widths == [10, 20]  # five steps up to step 20, then two
        flat = data.load(write_run(tmp_path / "flat", metrics[:2]))
        assert figures.schedule(flat) is None
