"""The command line of ``amo report``, and the sections of its page."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from amo_dist.schedule.plan_table import starved
from amo_dist.tools.command import Subparsers
from torchtitan_ext import files
from torchtitan_ext.tools import costs
from torchtitan_ext.tools.report import data, figures, page, style
from torchtitan_ext.tools.report.data import Run
from torchtitan_ext.tools.report.page import Heading, Missing, Part, Picture, Section, Table

NONE = "\N{EN DASH}"
NO_GEOMETRY = "no geometry.jsonl: the run was not tracked ([geometry] enable = true)"
NO_NORM = "no geometry.jsonl tells norms of updates"
NO_SCHEDULE = "its optimizer has no Newton-Schulz schedule"


def add_command(subparsers: Subparsers) -> None:
    """Register ``report``."""
    parser = subparsers.add_parser(
        "report",
        help="show what runs did, in one HTML file",
        description="Write loss curves, schedules, geometry and costs of runs into one HTML file "
        "that opens offline. Needs matplotlib (the extra 'plots').",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="dump folder of a run")
    parser.add_argument("-o", "--output", default="report.html", help="default: %(default)s")
    parser.add_argument("--png", metavar="DIR", help="write the pictures as PNG files, too")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the report for parsed arguments.

    Raises:
        ValueError: A run cannot be read, or matplotlib is missing.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError(
            "amo report: found no matplotlib, expected the extra: pip install 'amo-dist[plots]'"
        ) from None
    runs = data.load(args.runs)
    with style.applied():
        sections = make_sections(runs)
        output = Path(args.output)
        output.parent.mkdir(parents=True, exist_ok=True)
        names = ", ".join(one.label for one in runs)
        files.replace(output, page.render(f"AMO report: {names}", _lead(runs), sections))
        pictures = page.save_pngs(sections, Path(args.png)) if args.png else []
    print(f"written to {output} ({output.stat().st_size / 1e6:.2f} MB)")
    if pictures:
        print(f"{len(pictures)} pictures in {args.png}")
    return 0


def make_sections(runs: Sequence[Run]) -> list[Section]:
    """All sections; figures are drawn in the style that is set.

    Args:
        runs: At least one.
    """
    each = _PerRun(runs)
    return [
        Section("Runs", [_overview(runs)]),
        Section("Loss", [Picture("loss", figures.losses(runs), _LOSS)]),
        Section("Training", [Picture("training", figures.curves(runs), _TRAINING)]),
        each("Schedule", "schedule", figures.timeline, _timeline_caption, NO_SCHEDULE),
        _plan_section(runs, each("Plan", "plan", figures.plan, _plan_caption, "it made no plan")),
        each("Observed ell", "ell", figures.ells, _ell_caption, "it observes no ell (not AMO)"),
        each("F1: conditioning and residual", "f1", figures.scatter, _f1, NO_GEOMETRY),
        each("F2: operator types", "f2", figures.type_medians, _f2, NO_GEOMETRY),
        each("F3: layers", "f3", figures.layer_profiles, _f3, NO_GEOMETRY),
        each("F4: shallow and deep layers", "f4", figures.depth, _f4, NO_GEOMETRY),
        each("Norm of updates", "update_norm", figures.update_norms, _norm_caption, NO_NORM),
        Section("Newton-Schulz work", _work_parts(runs)),
        Section("Cost", [_cost_table(runs)]),
    ]


class _PerRun:
    """Sections with one picture, or the reason for none, for each run."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = runs

    def __call__(
        self,
        title: str,
        name: str,
        draw: Callable[[Run], Any],
        caption: Callable[[Run], str],
        reason: str,
    ) -> Section:
        parts: list[Part] = []
        missing: dict[str, list[str]] = {}
        several = len(self._runs) > 1
        for number, one in enumerate(self._runs, start=1):
            figure = draw(one)
            if figure is None:
                why = reason if not one.geometry or reason != NO_GEOMETRY else "too few matrices"
                missing.setdefault(why, []).append(one.label)
            else:
                file = f"{name}_{number}" if several else name
                parts += [Heading(one.label)] if several else []
                parts.append(Picture(file, figure, caption(one)))
        for why, labels in missing.items():
            parts.append(Missing(f"Nothing to show for {', '.join(labels)}: {why}."))
        return Section(title, parts)


def _lead(runs: Sequence[Run]) -> str:
    count = "one run" if len(runs) == 1 else f"{len(runs)} runs"
    return f"Adaptive Muon Orthogonalization: {count}. Colours stand for operator types throughout."


def _overview(runs: Sequence[Run]) -> Table:
    rows = []
    for one in runs:
        last = one.metrics[-1]
        losses = one.series("loss")
        tracked = len({record["step"] for record in one.geometry})
        rows.append(
            [
                one.label,
                _model(one),
                one.config.get("optimizer", {}).get("name", NONE),
                f"{last['step']:,}",
                f"{last.get('num_tokens') or 0:,}",
                last["phase"] or NONE,
                f"{losses[-1][1]:.4f}" if losses else NONE,
                f"{tracked} steps" if tracked else "off",
            ]
        )
    header = ["run", "model", "optimizer", "steps", "tokens", "phase", "last loss", "tracking"]
    return Table(header, rows)


def _model(one: Run) -> str:
    if one.geometry:
        return str(one.geometry[0].get("model", NONE))
    model = one.config.get("model", {})
    return f"{model['name']} {model['flavor']}" if model else NONE


# ---------------------------------------------------------------- captions

_LOSS = "Training loss, mean over ranks, at the logged steps; dotted, that of validations."
_TRAINING = "At the logged optimizer steps; waits and speed are means since the one before."


def _timeline_caption(one: Run) -> str:
    text = "Newton-Schulz steps of each operator type."
    if one.plan is not None:
        text += (
            f" The plan spends {sum(one.plan.allocation)} steps where the uniform schedule spends "
            f"{one.plan.base_steps * len(one.plan.operator_types)}."
        )
    return text


def _plan_caption(one: Run) -> str:
    assert one.plan is not None
    text = f"The {one.plan.error_name} of each operator type under the uniform schedule (grey) and "
    text += "under the last plan, with the Newton-Schulz steps of each."
    return " ".join([text, *(f"Note: {line}." for line in starved(one.plan))])


def _plan_section(runs: Sequence[Run], pictures: Section) -> Section:
    """Pictures of the plans, below what they gain in all."""
    rows = []
    for one in runs:
        plan = one.plan
        if plan is not None:
            uniform, flops = plan.uniform_objective, plan.flops_ratio
            rows.append(
                [
                    one.label,
                    plan.criterion,
                    *(f"{uniform:.5f}", f"{plan.objective:.5f}"),
                    f"{plan.objective / uniform:.3f}" if uniform else NONE,
                    f"{plan.base_steps * len(plan.operator_types)}",
                    f"{sum(plan.allocation)}",
                    NONE if flops is None else f"{flops:.4f}",
                ]
            )
    header = ["run", "objective", "of uniform", "of the plan", "ratio"]
    header += ["steps of uniform", "of the plan", "flops over uniform's"]
    note = (
        "The objective of an update is its squared error relative to its squared norm, by the "
        'distances of the sampled matrices to their polar factors (with update_norm = "exact" '
        "those of their directions); a projected one the error at the lower bound of each type, "
        "summed over types; a measured one, of an earlier version, the squared residual, summed "
        "over matrices."
    )
    table = [Table(header, rows, note)] if rows else []
    return Section(pictures.title, [*table, *pictures.parts])


def _ell_caption(one: Run) -> str:
    targets = "" if one.plan is None else " Dotted lines and triangles: targets of the last plan."
    return f"Effective ell of momentum, the latest median over sampled matrices.{targets}"


def _f1(one: Run) -> str:
    parts = [
        "Each point is one matrix at one tracked step: conditioning of momentum against",
        "normalised residual of what Newton-Schulz made of it.",
    ]
    # Of a run that plans again a phase has several stretches.
    by_phase: dict[str, list[Any]] = {}
    for phase, first, last in one.spans("phase"):
        by_phase.setdefault(phase, []).extend(
            record for record in one.geometry if first <= record["step"] <= last
        )
    found = []
    for phase, records in by_phase.items():
        r = data.pearson([(x, y) for x, y, _ in data.conditioning(records)])
        if r is not None:
            found.append(f"{phase} r = {r:.3f}")
    if len(found) > 1:
        parts.append(f"By phase: {', '.join(found)}.")
    parts.append("The AMO paper finds 0.67 to 0.91 over its eight models.")
    return " ".join(parts)


def _f2(one: Run) -> str:
    found = data.medians(one.geometry, lambda record: record["operator_type"])
    by_step: dict[int, list[tuple[float, str]]] = {}
    for name, series in found.items():
        for step, value in series:
            by_step.setdefault(step, []).append((value, name))
    hardest = [max(values)[1] for values in by_step.values()]
    easiest = [min(values)[1] for values in by_step.values()]
    text = (
        f"Median over the layers of a type. Hardest most often: {_most(hardest)}; "
        f"easiest: {_most(easiest)}."
    )
    types = data.between_share(one.geometry, "operator_type")
    layers = data.between_share(one.geometry, "layer")
    if types is not None and layers is not None:
        text += (
            f" Of the variance of log kappa at a step, {types:.0%} lies between types and "
            f"{layers:.0%} between layers, on average."
        )
    return text


def _most(names: Sequence[str]) -> str:
    most = max(sorted(set(names)), key=names.count)
    return f"{most} ({names.count(most)} of {len(names)} tracked steps)"


def _f3(one: Run) -> str:
    return (
        "Median over the operator types of a layer: along training for up to six layers, and along "
        "depth at up to five steps."
    )


def _f4(one: Run) -> str:
    sizes = [
        found.num_layers
        for name in figures.DEPTH_TYPES
        if (found := data.shallow_deep(one.geometry, name)) is not None
    ]
    text = (
        "Median over the first and the last layers; the dotted line is the first tracked step at "
    )
    text += "which their order is another than at the first one (n/a: none is)."
    if sizes and min(sizes) < 3:
        text += " The model has fewer than six layers: halves stand for three layers each."
    return text


def _norm_caption(one: Run) -> str:
    found = data.medians(one.geometry, lambda record: record["operator_type"], "update_norm")
    last = ", ".join(f"{name} {series[-1][1]:.3f}" for name, series in found.items())
    return (
        "Norm of what Newton-Schulz made of momentum over that of its exact polar factor, median "
        f"over the layers of a type; at the last tracked step {last}."
    )


# ---------------------------------------------------------------- work and cost


def _work_parts(runs: Sequence[Run]) -> list[Part]:
    figure = figures.work(runs)
    if figure is None:
        return [Missing("Nothing to show: no run has a Newton-Schulz schedule.")]
    caption = (
        "Work of the Newton-Schulz steps over that of the uniform schedule; in flops where the "
        "shapes are known (a plan or a geometry log), else in steps."
    )
    by_run = [data.optimizer_seconds_by_phase(one) for one in runs]
    shown = [name for name in style.PHASES if any(name in phases for phases in by_run)]
    rows = []
    for one, phases in zip(runs, by_run, strict=True):
        work = data.ns_work(one)
        if work is not None:
            seconds = [_scaled(phases.get(name), 1e3) for name in shown]
            last = f"{work.ratio[-1]:.3f}"
            rows.append([one.label, work.unit, f"{work.mean:.3f}", last, *seconds])
    header = ["run", "unit", "work (mean)", "work (last)"]
    header += [f"optimizer, {name} (ms)" for name in shown]
    note = (
        "Optimizer time is the median over the logged steps of a phase, observation and tracking "
        "included; observation and uniform run the uniform schedule."
    )
    return [Picture("work", figure, caption), Table(header, rows, note)]


def _cost_table(runs: Sequence[Run]) -> Table:
    columns: dict[str, tuple[str, float]] = {
        "step (ms)": ("seconds_per_step", 1e3),
        "optimizer (ms)": (costs.OPTIMIZER_SECONDS, 1e3),
        "waits for data (ms)": ("data_seconds_per_step", 1e3),
        "tokens/s": ("tokens_per_second", 1),
        "TFLOP/s of a device": ("tflops", 1),
        "of its peak (MFU, %)": ("mfu_percent", 1),
        "peak memory (MiB)": ("peak_memory_bytes", 2**-20),
        "an observation (ms)": ("observe_seconds", 1e3),
        "a tracked step (ms)": ("geometry_seconds", 1e3),
    }
    rows = []
    for one in runs:
        found = data.cost(one)
        cells = [_scaled(found[field], factor) for field, factor in columns.values()]
        rows.append([one.label, *cells])
    header = ["run", *columns]
    note = (
        "Medians over the logged steps after the first; of waits for data the mean, in each step "
        "those of its slowest rank. Peak memory is that of the logging rank: of its GPU, without "
        "one of its whole process. Observation and tracking are apart: what one of them adds to "
        "the step that has it (measuring; gathering wider is not in it)."
    )
    return Table(header, rows, note)


def _scaled(value: float | None, factor: float) -> str:
    return NONE if value is None else f"{value * factor:,.{1 if factor == 1e3 else 0}f}"
