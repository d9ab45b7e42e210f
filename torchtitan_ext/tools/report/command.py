"""The command line of ``amo report``, and the content of its page."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from amo_dist.schedule.plan import Plan
from amo_dist.schedule.plan_table import OBJECTIVES, starved
from amo_dist.tools import files
from amo_dist.tools.command import Subparsers
from torchtitan_ext.tools.report import data, figures, page, style
from torchtitan_ext.tools.report.data import Run
from torchtitan_ext.tools.report.page import Headline, Picture, Section, Table

NONE = "\N{EN DASH}"
NO_GEOMETRY = "geometry: no geometry.jsonl (--geometry.enable of a torchtitan run writes it)"


def add_command(subparsers: Subparsers) -> None:
    """Register ``report``."""
    parser = subparsers.add_parser(
        "report",
        help="draw loss, schedule, plan and geometry of runs in one HTML file",
        description="Write loss curves, schedules, plans and geometry of runs into one HTML file "
        "that opens offline. Needs matplotlib and Jinja (the extra 'plots').",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument(
        "-o", "--output", default="report.html", help="file to write (default %(default)s)"
    )
    parser.add_argument("--png", metavar="DIR", help="write the pictures as PNG files, too")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the report for parsed arguments.

    Raises:
        ValueError: A run cannot be read, or a library of the extra is missing.
    """
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"amo report: found no {error.name}, expected the extra: pip install 'amo-dist[plots]'"
        ) from None
    runs = data.load(args.runs)
    names = ", ".join(run.label for run in runs)
    with style.applied():
        sections, left_out = make_sections(runs)
        lead = "Adaptive Muon Orthogonalization. Each operator type keeps its colour in all plots."
        headlines = [_headline(run) for run in runs]
        text = page.render(f"AMO report: {names}", lead, headlines, sections, left_out)
        output = Path(args.output)
        output.parent.mkdir(parents=True, exist_ok=True)
        files.replace(output, text)
        count = page.save_pngs(sections, Path(args.png)) if args.png else 0
    print(f"written to {output} ({output.stat().st_size / 1e6:.2f} MB)")
    if count:
        print(f"{count} pictures in {args.png}")
    return 0


# ---------------------------------------------------------------- headline


def _headline(run: Run) -> Headline:
    last, entries = run.metrics[-1], []
    step, steps, phase = last["step"], last.get("training_steps"), last["phase"]
    if losses := run.series("loss"):
        of = f" of {steps:,}" if steps else ""
        entries.append(("loss", f"{losses[-1][1]:.4f}", f"at step {step:,}{of}"))
    locked = [first for name, first, _ in run.spans("phase") if name == "locked"]
    if phase and phase != "uniform":
        lock = last.get("lock_step")
        when = f"locks at step {lock:,}" if lock else "nothing is planned"
        place = (phase, when) if not locked else (f"step {locked[-1]:,}", f"now {phase}")
        entries.append(("locked at" if locked else "phase", *place))
    if run.plan is not None:
        error, uniform = run.plan.objective, run.plan.uniform_objective
        name = OBJECTIVES[run.plan.criterion]
        entries.append((name, f"{error:.4g}", f"uniform schedule: {uniform:.4g}"))
    if residuals := [value for _, value in run.series("newton_schulz/residual") if value]:
        entries.append(("residual", f"{residuals[-1]:.3g}", "last measurement after Newton-Schulz"))
    if (work := data.ns_work(run)) is not None:
        value = f"{work.ratio[-1]:.3f} \N{MULTIPLICATION SIGN}"
        entries.append(
            (f"Newton-Schulz {work.unit}", value, _spent(run) or "the uniform schedule's")
        )
    return Headline(run.label, entries)


def _spent(run: Run) -> str:
    """Steps and flops of a plan beside those of the uniform schedule."""
    plan = run.plan
    if plan is None:
        return ""
    uniform = plan.base_steps * len(plan.operator_types)
    flops = "" if plan.flops_ratio is None else f", at {100 * plan.flops_ratio:.1f} % of the flops"
    return f"{sum(plan.allocation)} steps instead of {uniform}{flops}"


# ---------------------------------------------------------------- sections


def make_sections(runs: Sequence[Run]) -> tuple[list[Section], list[str]]:
    """All sections with content, and one line for each picture that a run has no data for.

    Figures use the current style of matplotlib.

    Args:
        runs: One run or more.
    """
    pictures_of = _PerRun(runs)
    dotted = " Dotted: validation loss." if any(run.validations for run in runs) else ""
    training = [Picture("loss", figures.losses(runs), _LOSS + dotted)]
    work = figures.work(runs)
    flat = "Newton-Schulz steps: they never change"
    schedule = pictures_of("schedule", figures.timeline, _timeline_caption, flat)
    if work is not None:
        schedule.append(Picture("work", work, _WORK))
    plans = pictures_of("plan", figures.plan, _plan_caption, "plan: the run has none")
    plans += pictures_of("ell", figures.ells, _ell_caption, "ell: not observed")
    geometry = [
        *pictures_of("conditioning", figures.scatter, _CONDITIONING, NO_GEOMETRY),
        *pictures_of("condition_numbers", figures.type_medians, _type_caption, NO_GEOMETRY),
    ]
    geometry += pictures_of("update_norm", figures.update_norms, _norm_caption, NO_GEOMETRY)
    sections = [
        Section("Training", training),
        Section("Newton-Schulz schedule", schedule),
        Section("Plan", plans, _plan_table(runs), _PLAN if pictures_of.with_plan else ""),
        Section("Geometry", geometry),
        Section("Figures of the runs", table=_facts(runs)),
    ]
    return [
        section for section in sections if section.pictures or section.table
    ], pictures_of.left_out()


class _PerRun:
    """One picture for each run that has the data."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = runs
        self._missing: dict[str, list[str]] = {}
        self.with_plan = [run for run in runs if run.plan is not None]

    def __call__(
        self,
        name: str,
        draw: Callable[[Run], Any],
        caption: Callable[[Run], str] | str,
        reason: str,
    ) -> list[Picture]:
        pictures, several = [], len(self._runs) > 1
        for number, run in enumerate(self._runs, start=1):
            figure = draw(run)
            if figure is not None:
                text = caption if isinstance(caption, str) else caption(run)
                text = f"{run.label}. {text}" if several else text
                pictures.append(Picture(f"{name}_{number}" if several else name, figure, text))
                continue
            why = (
                reason if reason != NO_GEOMETRY or not run.geometry else "geometry: too few layers"
            )
            labels = self._missing.setdefault(why, [])
            labels += [run.label] if run.label not in labels else []
        return pictures

    def left_out(self) -> list[str]:
        return [
            f"Not shown for {', '.join(labels)}: {reason}."
            for reason, labels in self._missing.items()
        ]


# ---------------------------------------------------------------- captions

_LOSS = "Training loss at the logged steps, averaged over ranks."
_WORK = (
    "Work of the Newton-Schulz steps divided by the work of the uniform schedule: in flops if a "
    "plan or a geometry log gives the shapes, otherwise in steps."
)
_CONDITIONING = (
    "Each point is one matrix at one tracked step: the condition number of its momentum, and the "
    "residual after Newton-Schulz."
)
_PLAN = (
    "The error of an update is its squared distance from the polar factor, divided by the squared "
    'norm of the polar factor, over the sampled matrices. With update_norm = "exact" it is the '
    "error of the direction. A projected error is the error at the lower bound of each type, "
    "summed over types."
)


def _timeline_caption(run: Run) -> str:
    spent = _spent(run)
    text = "Newton-Schulz steps of each operator type"
    text += ", above the learning rate." if run.series("lr") else "."
    return f"{text} The plan spends {spent}." if spent else text


def _plan_caption(run: Run) -> str:
    assert run.plan is not None
    text = f"The {run.plan.error_name} of each operator type under the uniform schedule (grey) and "
    text += "under the last plan, with the Newton-Schulz steps of each."
    return " ".join([text, *(f"Note: {line}." for line in starved(run.plan))])


def _ell_caption(run: Run) -> str:
    targets = "" if run.plan is None else " Dotted: the ell for which the plan is composed."
    return f"Effective ell of momentum, the latest median over sampled matrices.{targets}"


def _type_caption(run: Run) -> str:
    by_step: dict[int, list[tuple[float, str]]] = {}
    for name, series in data.medians(run.geometry, data.operator_type).items():
        for step, value in series:
            by_step.setdefault(step, []).append((value, name))
    hardest = [max(values)[1] for values in by_step.values()]
    easiest = [min(values)[1] for values in by_step.values()]
    return (
        "Condition number of momentum, median over the layers of a type. Hardest most often: "
        f"{_most(hardest)}; easiest: {_most(easiest)}."
    )


def _most(names: Sequence[str]) -> str:
    most = max(sorted(set(names)), key=names.count)
    return f"{most} ({names.count(most)} of {len(names)} tracked steps)"


def _norm_caption(run: Run) -> str:
    by_type = data.medians(run.geometry, data.operator_type, "update_norm")
    last = ", ".join(f"{name} {series[-1][1]:.3f}" for name, series in by_type.items())
    return (
        "Norm of the orthogonalized momentum divided by the norm of its exact polar factor, median "
        f"over the layers of a type. At the last tracked step: {last}."
    )


# ---------------------------------------------------------------- tables


def _table(runs: Sequence[Run], rows: Sequence[tuple[str, Sequence[str | None]]]) -> Table:
    """One row for each figure that any run has, one column for each run."""
    shown = [(name, cells) for name, cells in rows if any(cell is not None for cell in cells)]
    header = ["", *(run.label for run in runs)]
    return Table(header, [[name, *(cell or NONE for cell in cells)] for name, cells in shown])


def _plan_table(runs: Sequence[Run]) -> Table | None:
    """Errors, steps and flops of the plans, and of the uniform schedule."""
    planned = [run for run in runs if run.plan is not None]
    columns = []
    for run in planned:
        plan = run.plan
        assert plan is not None
        uniform, flops = plan.uniform_objective, plan.flops_ratio
        columns.append(
            {
                "planned by": OBJECTIVES[plan.criterion],
                "error of the uniform schedule": f"{uniform:.5f}",
                "error of the plan": f"{plan.objective:.5f}",
                "error, plan over uniform": f"{plan.objective / uniform:.3f}" if uniform else None,
                "steps of the uniform schedule": f"{plan.base_steps * len(plan.operator_types)}",
                "steps of the plan": f"{sum(plan.allocation)}",
                "flops, plan over uniform": None if flops is None else f"{flops:.4f}",
                **_ladder_cells(plan),
            }
        )
    if not columns:
        return None
    return _table(planned, [(name, [column[name] for column in columns]) for name in columns[0]])


def _ladder_cells(plan: Plan) -> dict[str, str | None]:
    """``tau`` of a plan's ladder, and its flops at some rates."""
    cells = {"ladder, tau": None if plan.ladder is None else f"{plan.ladder.tau:g}"}
    for name, rate in (("half", 0.5), ("a quarter of", 0.25), ("a tenth of", 0.1)):
        flops = None if plan.ladder is None else plan.flops_ratio_of(plan.steps_at(rate))
        text = None if flops is None else f"{flops:.4f}"
        cells[f"flops over uniform, {name} the peak rate"] = text
    return cells


def _facts(runs: Sequence[Run]) -> Table:
    rows: list[tuple[str, Sequence[str | None]]] = [
        ("model", [_model(run) for run in runs]),
        ("optimizer", [run.config.get("optimizer", {}).get("name") for run in runs]),
        ("steps", [f"{run.metrics[-1]['step']:,}" for run in runs]),
        ("tokens", [_count(run.metrics[-1].get("num_tokens")) for run in runs]),
        (
            "validation loss",
            [f"{v[-1][1]:.4f}" if (v := run.validations) else None for run in runs],
        ),
    ]
    works = [data.ns_work(run) for run in runs]
    mean = [None if work is None else f"{work.mean:.3f} ({work.unit})" for work in works]
    last = [None if work is None else f"{work.ratio[-1]:.3f} ({work.unit})" for work in works]
    rows.append(("Newton-Schulz work over uniform's, mean", mean))
    rows.append(("Newton-Schulz work over uniform's, at the end", last))
    return _table(runs, rows)


def _model(run: Run) -> str | None:
    if run.geometry:
        return str(run.geometry[0].get("model", NONE))
    model = run.config.get("model", {})
    return f"{model['name']} {model['flavor']}" if model else None


def _count(value: float | None) -> str | None:
    return None if value is None else f"{value:,.0f}"
