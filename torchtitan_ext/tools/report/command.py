"""The command line of ``amo report``, and the content of its page."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from amo_dist.schedule.plan import OBJECTIVES, starved
from torchtitan_ext.runs import files
from torchtitan_ext.tools.report import data, figures, page, style
from torchtitan_ext.tools.report.data import Run
from torchtitan_ext.tools.report.page import Picture, Section, Table

NONE = "\N{EN DASH}"
NO_GEOMETRY = "geometry: little or nothing in geometry.jsonl"


def add_command(subparsers: Any) -> None:
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
        text = page.render(f"AMO report: {names}", lead, sections, left_out)
        output = Path(args.output)
        output.parent.mkdir(parents=True, exist_ok=True)
        files.replace(output, text)
        count = page.save_pngs(sections, Path(args.png)) if args.png else 0
    print(f"written to {output} ({output.stat().st_size / 1e6:.2f} MB)")
    if count:
        print(f"{count} pictures in {args.png}")
    return 0


# ---------------------------------------------------------------- sections

_LOSS = (
    "Training loss at the logged steps, averaged over ranks. Dotted, if there is any: validation "
    "loss."
)
_SCHEDULE = "Newton-Schulz steps of each operator type, above the learning rate if it is logged."
_WORK = (
    "Work of the Newton-Schulz steps divided by the work of the uniform schedule: in flops "
    "once there is a plan, otherwise in steps."
)
_ELL = (
    "Effective ell of momentum, the latest median over sampled matrices. Dotted, once there is a "
    "plan: the ell for which it is composed."
)
_PLAN = (
    "The error of an update is its squared distance from the polar factor, divided by the squared "
    'norm of the polar factor, over the sampled matrices. With update_norm = "exact" it is the '
    "error of the direction. A projected error is the error at the lower bound of each type, "
    "summed over types."
)
_CONDITIONING = (
    "Each point is one matrix at one tracked step: the condition number of its momentum, and the "
    "residual after Newton-Schulz."
)
_TYPES = "Condition number of momentum, median over the layers of a type."
_NORM = (
    "Norm of the orthogonalized momentum divided by the norm of its exact polar factor, median "
    "over the layers of a type."
)


def make_sections(runs: Sequence[Run]) -> tuple[list[Section], list[str]]:
    """All sections with content, and one line for each picture that a run has no data for.

    Figures use the current style of matplotlib.

    Args:
        runs: One run or more.
    """
    labels_by_reason: dict[str, list[str]] = {}

    def pictures(
        name: str, draw: Callable[[Run], Any], caption: Callable[[Run], str] | str, reason: str
    ) -> list[Picture]:
        drawn = []
        for number, run in enumerate(runs, start=1):
            if (figure := draw(run)) is None:
                labels = labels_by_reason.setdefault(reason, [])
                labels += [run.label] if run.label not in labels else []
                continue
            text = caption if isinstance(caption, str) else caption(run)
            if len(runs) == 1:
                drawn.append(Picture(name, figure, text))
            else:
                drawn.append(Picture(f"{name}_{number}", figure, f"{run.label}. {text}"))
        return drawn

    flat = "Newton-Schulz steps: they never change"
    schedule = pictures("schedule", figures.timeline, _SCHEDULE, flat)
    if (work := figures.work(runs)) is not None:
        schedule.append(Picture("work", work, _WORK))
    plans = pictures("plan", figures.plan, _plan_caption, "plan: the run has none")
    plans += pictures("ell", figures.ells, _ELL, "ell: not observed")
    geometry = [
        *pictures("conditioning", figures.scatter, _CONDITIONING, NO_GEOMETRY),
        *pictures("condition_numbers", figures.type_medians, _TYPES, NO_GEOMETRY),
        *pictures("update_norm", figures.update_norms, _NORM, NO_GEOMETRY),
    ]
    plan_table = _plan_table([run for run in runs if run.plan is not None])
    sections = [
        Section("Training", [Picture("loss", figures.losses(runs), _LOSS)], _facts(runs)),
        Section("Newton-Schulz schedule", schedule),
        Section("Plan", plans, plan_table, _PLAN if plan_table else ""),
        Section("Geometry", geometry),
    ]
    left_out = [
        f"Not shown for {', '.join(labels)}: {reason}."
        for reason, labels in labels_by_reason.items()
    ]
    return [section for section in sections if section.pictures or section.table], left_out


def _plan_caption(run: Run) -> str:
    assert run.plan is not None
    text = f"The {run.plan.error_name} of each operator type under the uniform schedule (grey) and "
    text += "under the last plan, with the Newton-Schulz steps of each."
    return " ".join([text, *(f"Note: {line}." for line in starved(run.plan))])


# ---------------------------------------------------------------- tables


def _table(runs: Sequence[Run], columns: Sequence[Mapping[str, str | None]]) -> Table:
    """One column for each run, and one row for each figure that any of them has."""
    rows = [[name, *(column[name] or NONE for column in columns)] for name in columns[0]]
    shown = [row for row in rows if any(cell != NONE for cell in row[1:])]
    return Table(["", *(run.label for run in runs)], shown)


def _plan_table(runs: Sequence[Run]) -> Table | None:
    """Errors, steps and flops of the plans, and of the uniform schedule; None without any run."""
    columns = []
    for run in runs:
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
            }
        )
    return _table(runs, columns) if columns else None


def _facts(runs: Sequence[Run]) -> Table:
    """Model, progress, loss, phase and Newton-Schulz work of each run."""
    columns = []
    for run in runs:
        last, work = run.metrics[-1], data.ns_work(run)
        total, tokens = last.get("training_steps"), last.get("num_tokens")
        loss = run.series("loss")
        # 0 is no measurement, as after a resume.
        residuals = [value for _, value in run.series("newton_schulz/residual") if value]
        columns.append(
            {
                "model": _model(run),
                "optimizer": run.config.get("optimizer", {}).get("name"),
                "steps": f"{last['step']:,}" + (f" of {total:,}" if total else ""),
                "tokens": None if tokens is None else f"{tokens:,.0f}",
                "loss": f"{loss[-1][1]:.4f}" if loss else None,
                "validation loss": f"{run.validations[-1][1]:.4f}" if run.validations else None,
                "phase": _phase(run),
                "residual after Newton-Schulz": f"{residuals[-1]:.3g}" if residuals else None,
                "Newton-Schulz work over uniform's, mean": work
                and f"{work.mean:.3f} ({work.unit})",
                "Newton-Schulz work over uniform's, at the end": work
                and f"{work.ratio[-1]:.3f} ({work.unit})",
            }
        )
    return _table(runs, columns)


def _phase(run: Run) -> str | None:
    """Phase at the end, and the step of the lock if there is one."""
    phase, lock = run.metrics[-1]["phase"], run.metrics[-1].get("lock_step")
    locked = [first for name, first, _ in run.spans("phase") if name == "locked"]
    if locked:
        return f"{phase}, locked at step {locked[-1]:,}"
    return f"{phase}, locks at step {lock:,}" if lock else phase or None


def _model(run: Run) -> str | None:
    if run.geometry:
        return str(run.geometry[0].get("model", NONE))
    model = run.config.get("model", {})
    return f"{model['name']} {model['flavor']}" if model else None
