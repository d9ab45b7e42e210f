"""The report: its figures' numbers, what it says of missing data, and a page that stands alone."""

from __future__ import annotations

import argparse
import html.parser
import json
import math
from pathlib import Path
from typing import Any

import pytest

from amo_dist import AMOConfig
from amo_dist.config import OPERATOR_TYPES
from amo_dist.schedule.plan import Plan
from amo_dist.schedule.planning import plan_allocation, plan_measured
from amo_dist.schedule.trials import Measured
from benchmarks.amo_paper import __main__ as paper
from benchmarks.amo_paper import figures
from torchtitan_ext.tools.report import command as report
from torchtitan_ext.tools.report import data, style

GOLDEN = Path(__file__).parents[1] / "golden"
QWEN = json.loads((GOLDEN / "locked_schedules.json").read_text())["Qwen3-1.7B"]


def metric(step: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 5.0 - 0.01 * step,
        "num_tokens": 100 * step,
        "tokens_per_second": 50.0,
        "seconds_per_step": 2.0,
        "optimizer_seconds_per_step": 0.5,
        "peak_memory_bytes": 2**20 * step,
        "geometry_seconds": 0.25,
        "phase": "observation" if step <= 20 else "locked",
        "num_steps_by_type": dict.fromkeys(OPERATOR_TYPES, 5),
        "optimizer": {f"amo/ell/{name}": 1e-3 / step for name in OPERATOR_TYPES}
        | {"optimizer/observe_seconds": 0.03125},
        "observe_seconds": 0.125 if step == 20 else None,
        **changes,
    }


def geometry(step: int, layer: int, operator_type: str, kappa: float | None) -> dict[str, Any]:
    return {
        "step": step,
        "name": f"layers.{layer}.{operator_type}.weight",
        "layer": layer,
        "operator_type": operator_type,
        "model": "Llama-3.1-<test>",
        "family": "Llama-3.1",
        "shape": [8, 16],
        "kappa": kappa,
        "ns_residual": None if kappa is None else math.log10(kappa) / 10,
        "update_norm": 0.75 + 0.001 * layer,
    }


def geometry_log(num_layers: int = 8) -> list[dict[str, Any]]:
    """Kappa grows by type; deep layers overtake shallow ones at step 30."""
    return [
        geometry(step, layer, name, 10.0 ** (2 + i) * (1 + (layer if step >= 30 else -layer) / 100))
        for step in (10, 20, 30)
        for layer in range(num_layers)
        for i, name in enumerate(OPERATOR_TYPES)
    ]


def write_run(folder: Path, metrics: list[dict[str, Any]], log: list[dict[str, Any]]) -> Path:
    folder.mkdir()
    for name, records in (("metrics.jsonl", metrics), ("geometry.jsonl", log)):
        if records:
            (folder / name).write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


# ---------------------------------------------------------------- numbers


def test_conditioning_leaves_out_what_is_not_finite_or_in_no_layer() -> None:
    records = [geometry(1, 0, "attn_q", 100.0), geometry(1, 1, "attn_q", None)]
    records.append({**geometry(1, 2, "attn_q", 10.0), "layer": None})
    assert data.conditioning(records) == [(2.0, 0.2, 0)]


def test_depth_takes_three_layers_and_never_one_twice() -> None:
    found = figures.shallow_deep(geometry_log(), "attn_q")
    assert found is not None
    assert (found.num_layers, found.crossing) == (3, 30)
    assert found.shallow[0] == (10, pytest.approx(99.0))  # the median of layers 0, 1, 2
    assert found.deep[0] == (10, pytest.approx(94.0))
    for num_layers, size in ((5, 2), (2, 1)):
        few = figures.shallow_deep(geometry_log(num_layers), "attn_q")
        assert few is not None
        assert few.num_layers == size
    assert figures.shallow_deep(geometry_log(1), "attn_q") is None


def test_work_weighs_types_by_their_flops(tmp_path: Path) -> None:
    plan = plan_allocation(
        AMOConfig.paper(), {"attn_q": 1e-3, "attn_k": 1e-3}, costs={"attn_q": 1, "attn_k": 8}
    )
    counts = {"attn_q": 5, "attn_k": 6}
    metrics = [metric(10, num_steps_by_type={"attn_q": 5, "attn_k": 5})]
    metrics.append(metric(40, num_steps_by_type=counts))
    found = data.ns_work(data.load_one(with_plan(write_run(tmp_path / "run", metrics, []), plan)))
    assert found is not None
    assert found.unit == "flops"
    assert found.ratio == [1.0, pytest.approx((5 + 6 * 8) / (5 * 9))]
    assert found.mean == pytest.approx((10 * 1.0 + 30 * 53 / 45) / 40)


def test_phases_and_schedules_are_told_from_their_first_steps_on(tmp_path: Path) -> None:
    five, six = {"attn_q": 5}, {"attn_q": 6}

    def logged(step: int, *changes: tuple[int, str, dict[str, int]]) -> dict[str, Any]:
        names = ("step", "phase", "num_steps_by_type")
        found = [dict(zip(names, change, strict=True)) for change in changes]
        return {**metric(step), **found[-1], "step": step, "changes": found}

    metrics = [
        logged(10, (1, "observation", five)),
        # Between two logged steps: the transition, and a change of steps within it.
        logged(20, (13, "transition", five), (15, "transition", six), (17, "locked", six)),
        logged(30, (17, "locked", six)) | {"changes": []},
    ]
    (run,) = data.load([write_run(tmp_path / "run", metrics, [])])
    assert run.spans("phase") == [
        ("observation", 1, 12),
        ("transition", 13, 16),
        ("locked", 17, 30),
    ]
    assert run.spans("num_steps_by_type") == [(five, 1, 14), (six, 15, 30)]
    work = data.ns_work(run)
    assert work is not None
    assert work.mean == pytest.approx((14 + 16 * 6 / 5) / 30)


# ---------------------------------------------------------------- the page


class Page(html.parser.HTMLParser):
    """Checks that tags nest, and keeps what they name."""

    VOID = ("meta", "img", "br", "link", "hr")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.sources: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        assert len(found) == len(attrs), attrs
        self.tags.append(tag)
        self.ids += [found["id"] or ""] if "id" in found else []
        self.sources += [found[key] or "" for key in ("src", "href") if key in found]
        assert tag != "img" or found.get("alt")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, text: str) -> None:
        self.text += text


def make(tmp_path: Path, *runs: Path, **options: Any) -> Page:
    pytest.importorskip("matplotlib")
    output = tmp_path / "out" / "report.html"
    arguments = {"runs": [str(run) for run in runs], "output": str(output), "png": None, **options}
    assert report.run(argparse.Namespace(**arguments)) == 0
    page = Page(output.read_text("utf-8"))
    assert len(set(page.ids)) == len(page.ids)
    assert "script" not in page.tags
    assert "link" not in page.tags
    # It opens offline: nothing but its own anchors and pictures.
    assert all(source.startswith(("#s", "data:image/")) for source in page.sources)
    assert {source[1:] for source in page.sources if source[0] == "#"} == set(page.ids)
    return page


@pytest.mark.slow
def test_a_tracked_run_shows_everything(tmp_path: Path) -> None:
    metrics = [metric(1), metric(10, grad_norm=2.0), metric(20, grad_norm=1.0), metric(30)]
    metrics[-1] |= {"training_steps": 40, "tflops": 400.0, "mfu_percent": 40.44}
    metrics[-1]["num_steps_by_type"] = {**metrics[0]["num_steps_by_type"], "attn_q": 6}
    run = write_run(tmp_path / "a&b", metrics, geometry_log())
    ells = {name: row["ell_target"] for name, row in QWEN.items()}
    with_plan(run, plan_allocation(AMOConfig.paper(), ells))
    page = make(tmp_path, run, png=str(tmp_path / "png"))
    names = ["condition_numbers", "conditioning", "ell"]
    names += ["loss", "plan", "schedule", "update_norm", "work"]
    assert sorted(path.stem for path in (tmp_path / "png").iterdir()) == names
    assert page.tags.count("img") == len(names)
    assert "a&b" in page.text
    assert "Llama-3.1-<test>" in page.text  # escaped, or it would be a tag
    assert "Not shown" not in page.text
    text = " ".join(page.text.split())
    for told in (
        "steps 30 of 40",
        "loss 4.7000",
        "phase locked, locked at step 21",
        "error of the uniform schedule 2.22067",
        "error of the plan 0.946",
    ):
        assert told in text


@pytest.mark.slow
def test_figures_are_read_on_a_phone(tmp_path: Path) -> None:
    """A picture shrunk to 360 pixels still has letters of nine or more, and nothing lies on top."""
    pytest.importorskip("matplotlib")
    metrics = [metric(step, lr=1e-6 * step, tokens_per_second=1e6 + step) for step in (1, 20, 30)]
    metrics[-1]["num_steps_by_type"] = dict.fromkeys(OPERATOR_TYPES, 2)
    run = data.load_one(write_run(tmp_path / "run", metrics, geometry_log()))
    with style.applied():
        sections, _ = report.make_sections([run])
        pictures = [one.figure for section in sections for one in section.pictures]
        assert len(pictures) >= 5
        for figure in pictures:
            figure.canvas.draw()
            scale = 360 / (72 * figure.get_figwidth())
            for axes in figure.axes:
                for axis in (axes.xaxis, axes.yaxis):
                    assert axis.get_offset_text().get_text() == ""
                    assert all(tick.get_size() * scale >= 9 for tick in axis.get_ticklabels())
        bars, rates = report.figures.timeline(run).axes
        assert len(bars.patches) > len(OPERATOR_TYPES)
        assert rates.lines[0].get_xydata().tolist() == [[s, 1e-6 * s] for s in (1, 20, 30)]


def with_plan(run: Path, plan: Plan) -> Path:
    (run / "plan.json").write_text(plan.to_json())
    return run


@pytest.mark.slow
def test_a_plan_stands_beside_the_uniform_schedule(tmp_path: Path) -> None:
    # Little is left of the directions of attn_q in 6 and 7 steps, and of attn_k in any.
    hard = Measured(3, (1e-4,) * 5, (0.5,) * 5, (1.0, 0.81, 0.49, 0.04, 0.01), 0.5, 0.64)
    easy = Measured(3, (1e-3,) * 5, (0.0,) * 5, (0.04, 0.01, 0.0, 0.0, 0.0), 0.0, 0.01)
    measured = plan_measured(
        AMOConfig(),
        {"attn_q": hard, "attn_k": easy},
        num_matrices=(2, 1),
        weights=[0.75, 0.25],
        ell_robust=(1e-5, 1e-3),
        costs={"attn_q": 1, "attn_k": 1},
    )
    assert measured.allocation == (7, 3)
    ells = {name: row["ell_target"] for name, row in QWEN.items()}
    starving = plan_allocation(AMOConfig.paper(budget_ratio=0.9143), ells)
    page = make(
        tmp_path,
        with_plan(write_run(tmp_path / "new", [metric(10)], []), measured),
        with_plan(write_run(tmp_path / "old", [metric(10)], []), starving),
        write_run(tmp_path / "none", [metric(10)], []),
        png=str(tmp_path / "png"),
    )
    assert {"plan_1.png", "plan_2.png"} <= {path.name for path in (tmp_path / "png").iterdir()}
    objective, uniform = 0.75 * 0.01 + 0.25 * 0.04, 0.75 * 0.64 + 0.25 * 0.01
    text = " ".join(page.text.split())
    for told in (
        "planned by squared error of the update projected error",
        f"error of the uniform schedule {uniform:.5f} 2.22067",
        f"error of the plan {objective:.5f} 1.81930",
        f"error, plan over uniform {objective / uniform:.3f} 0.819",
        "steps of the uniform schedule 10 35 steps of the plan 10 32",
        "flops, plan over uniform 1.0000 \N{EN DASH}",  # no costs, no flops
        "Not shown for none: plan: the run has none.",
    ):
        assert told in text
    assert "The distance of each operator type under" in page.text
    assert "The projected error of each operator type under" in page.text
    assert page.text.count("Note: the plan starves") == 1
    assert "Note: the plan starves attn_o: 3 Newton-Schulz steps" in page.text


def test_what_is_missing_is_left_out_and_said_once(tmp_path: Path) -> None:
    bare = metric(10, phase="", num_steps_by_type={}, optimizer={}, geometry_seconds=None)
    page = make(tmp_path, write_run(tmp_path / "adamw", [bare], []))
    assert page.tags.count("img") == 1  # the loss
    assert page.tags.count("section") == 1
    assert page.text.count("Not shown for adamw: ") == 4
    assert "--geometry.enable" in page.text
    more = write_run(tmp_path / "sgd", [bare], [])
    together = make(tmp_path, tmp_path / "adamw", more)
    assert together.text.count("Not shown for adamw, sgd: ") == 4


def test_the_last_measured_residual_stands_where_a_resume_has_none_yet(tmp_path: Path) -> None:
    residuals = {10: 0.25, 20: 0.125, 30: 0.0}
    metrics = [metric(k, optimizer={"newton_schulz/residual": x}) for k, x in residuals.items()]
    assert "0.125" in make(tmp_path, write_run(tmp_path / "run", metrics, [])).text


def test_two_runs_stand_side_by_side(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    first = write_run(tmp_path / "run", [metric(10), metric(20)], [])
    second = write_run(tmp_path / "x" / "run", [metric(10), metric(20)], [])
    page = make(tmp_path, first, second)
    assert "x/run" in page.text  # folders of one name are told apart
    with pytest.raises(ValueError, match="expected each run once"):
        data.load([first, first])


@pytest.mark.slow
def test_the_figures_of_the_paper_come_from_a_tracked_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    metrics = [metric(1), metric(10), metric(20), metric(30)]
    folder = write_run(tmp_path / "run", metrics, geometry_log())
    assert paper.main(["figures", str(folder), "-o", str(tmp_path / "png")]) == 0
    names = ["f1", "f2", "f3_depth", "f3_steps", "f4_attn_q", "f4_mlp_up"]
    assert sorted(path.stem for path in (tmp_path / "png").iterdir()) == names
    text = capsys.readouterr().out
    assert "all r = 1.000, observation r = 1.000, locked r = 1.000" in text
    assert "attn_q: first and last 3 layers; they cross at step 30." in text
    bare = write_run(tmp_path / "bare", metrics, [])
    assert paper.main(["figures", str(bare)]) == 2
