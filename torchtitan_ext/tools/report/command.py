"""The command line of ``amo report``, and what stands on its page."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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
        help="show what runs did, in one HTML file",
        description="Write loss curves, schedules, geometry and costs of runs into one HTML file "
        "that opens offline. Needs matplotlib and Jinja (the extra 'plots').",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument("-o", "--output", default="report.html", help="default: %(default)s")
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
    names = ", ".join(one.label for one in runs)
    with style.applied():
        sections, left_out = make_sections(runs)
        lead = "Adaptive Muon Orthogonalization. A colour is one operator type throughout."
        headlines = [_headline(one) for one in runs]
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


def _headline(one: Run) -> Headline:
    last, found = one.metrics[-1], []
    step, steps, phase = last["step"], last.get("training_steps"), last["phase"]
    if losses := one.series("loss"):
        of = f" of {steps:,}" if steps else ""
        found.append(("loss", f"{losses[-1][1]:.4f}", f"at step {step:,}{of}"))
    locked = [first for name, first, _ in one.spans("phase") if name == "locked"]
    if phase and phase != "uniform":
        lock = last.get("lock_step")
        when = f"locks at step {lock:,}" if lock else "nothing is planned"
        place = (phase, when) if not locked else (f"step {locked[-1]:,}", f"now {phase}")
        found.append(("locked at" if locked else "phase", *place))
    if one.plan is not None:
        error, uniform = one.plan.objective, one.plan.uniform_objective
        name = OBJECTIVES[one.plan.criterion]
        found.append((name, f"{error:.4g}", f"where uniform leaves {uniform:.4g}"))
    if guard := [value for _, value in one.series(figures.GUARD) if value]:
        found.append(("residual", f"{guard[-1]:.3g}", "after Newton-Schulz, the last measured"))
    if (work := data.ns_work(one)) is not None:
        value = f"{work.ratio[-1]:.3f} \N{MULTIPLICATION SIGN}"
        found.append(
            (f"Newton-Schulz {work.unit}", value, _spends(one) or "the uniform schedule's")
        )
    return Headline(one.label, found)


def _spends(one: Run) -> str:
    """Steps and flops of a plan beside those of the uniform schedule."""
    plan = one.plan
    if plan is None:
        return ""
    uniform = plan.base_steps * len(plan.operator_types)
    flops = "" if plan.flops_ratio is None else f", at {plan.flops_ratio:.4f} of its flops"
    return f"{sum(plan.allocation)} steps where uniform spends {uniform}{flops}"


# ---------------------------------------------------------------- sections


def make_sections(runs: Sequence[Run]) -> tuple[list[Section], list[str]]:
    """All sections that have something to show, and a line for each that a run lacks.

    Figures are drawn in the style that is set.

    Args:
        runs: At least one.
    """
    each = _PerRun(runs)
    curves = [(key, figures.curve(runs, key), text) for key, text in figures.CURVES.items()]
    dotted = " Dotted: validation loss." if any(one.validations for one in runs) else ""
    training = [Picture("loss", figures.losses(runs), _LOSS + dotted)]
    training += [Picture(_file(key), one, f"{text}.") for key, one, text in curves if one]
    work = figures.work(runs)
    flat = "Newton-Schulz steps: none changes"
    schedule = each("schedule", figures.timeline, _timeline_caption, flat)
    if work is not None:
        schedule.append(Picture("work", work, _WORK))
    plans = each("plan", figures.plan, _plan_caption, "plan: none is made")
    plans += each("ell", figures.ells, _ell_caption, "ell: its optimizer observes none")
    f3 = "Condition numbers of layers, median over operator types (the paper's F3)"
    geometry = [
        *each("f1", figures.scatter, _f1, NO_GEOMETRY),
        *each("f2", figures.type_medians, _f2, NO_GEOMETRY),
        *each("f3_steps", figures.layers_over_steps, f"{f3}, over training.", NO_GEOMETRY),
        *each("f3_depth", figures.profile_over_depth, f"{f3}, over depth.", NO_GEOMETRY),
    ]
    for name in figures.DEPTH_TYPES:
        draw = functools.partial(figures.depth, operator_type=name)
        caption = functools.partial(_f4, operator_type=name)
        geometry += each(f"f4_{name}", draw, caption, NO_GEOMETRY)
    geometry += each("update_norm", figures.update_norms, _norm_caption, NO_GEOMETRY)
    sections = [
        Section("Training", training),
        Section("Newton-Schulz schedule", schedule),
        Section("Plan", plans, _plan_table(runs), _PLAN if each.with_plan else ""),
        Section("Geometry", geometry),
        Section("Figures of the runs", table=_facts(runs), note=_FACTS),
    ]
    return [one for one in sections if one.pictures or one.table], each.left_out()


class _PerRun:
    """One picture for each run that has what it shows."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = runs
        self._missing: dict[str, list[str]] = {}
        self.with_plan = [one for one in runs if one.plan is not None]

    def __call__(
        self,
        name: str,
        draw: Callable[[Run], Any],
        caption: Callable[[Run], str] | str,
        reason: str,
    ) -> list[Picture]:
        pictures, several = [], len(self._runs) > 1
        for number, one in enumerate(self._runs, start=1):
            figure = draw(one)
            if figure is not None:
                text = caption if isinstance(caption, str) else caption(one)
                text = f"{one.label}. {text}" if several else text
                pictures.append(Picture(f"{name}_{number}" if several else name, figure, text))
                continue
            why = (
                reason if reason != NO_GEOMETRY or not one.geometry else "geometry: too few layers"
            )
            labels = self._missing.setdefault(why, [])
            labels += [one.label] if one.label not in labels else []
        return pictures

    def left_out(self) -> list[str]:
        return [f"Not shown of {', '.join(who)}: {why}." for why, who in self._missing.items()]


def _file(key: str) -> str:
    return key.rpartition("/")[2]


# ---------------------------------------------------------------- captions

_LOSS = "Training loss, mean over ranks, at the logged steps."
_WORK = (
    "Work of the Newton-Schulz steps over that of the uniform schedule; in flops where the shapes "
    "are known (a plan or a geometry log), else in steps."
)
_PLAN = (
    "The error of an update is its squared distance from the polar factor relative to its squared "
    'norm, over the sampled matrices (with update_norm = "exact" that of their directions). A '
    "projected error is that at the lower bound of each type, summed over types."
)
_FACTS = (
    "Times are medians over the logged steps after the first, waits for data the mean; an "
    "optimizer's step includes observation and tracking, which are told apart, too: what "
    "measuring adds to the step that has it. Peak memory is that of the logging rank: of its GPU, "
    "without one of its whole process."
)


def _timeline_caption(one: Run) -> str:
    spends = _spends(one)
    text = "Newton-Schulz steps of each operator type."
    return f"{text} The plan spends {spends}." if spends else text


def _plan_caption(one: Run) -> str:
    assert one.plan is not None
    text = f"The {one.plan.error_name} of each operator type under the uniform schedule (grey) and "
    text += "under the last plan, with the Newton-Schulz steps of each."
    return " ".join([text, *(f"Note: {line}." for line in starved(one.plan))])


def _ell_caption(one: Run) -> str:
    targets = "" if one.plan is None else " Dotted: what the last plan is composed for."
    return f"Effective ell of momentum, the latest median over sampled matrices.{targets}"


def _f1(one: Run) -> str:
    points = data.conditioning(one.geometry)
    r = data.pearson([(x, y) for x, y, _ in points])
    parts = [
        "Each point is one matrix at one tracked step: condition number of momentum against",
        "residual of what Newton-Schulz made of it (the paper's F1).",
        f"Pearson's r = {'n/a' if r is None else f'{r:.3f}'} over {len(points):,} points.",
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
    found = data.medians(one.geometry, data.operator_type)
    by_step: dict[int, list[tuple[float, str]]] = {}
    for name, series in found.items():
        for step, value in series:
            by_step.setdefault(step, []).append((value, name))
    hardest = [max(values)[1] for values in by_step.values()]
    easiest = [min(values)[1] for values in by_step.values()]
    text = (
        "Condition number of momentum, median over the layers of a type (the paper's F2). Hardest "
        f"most often: {_most(hardest)}; easiest: {_most(easiest)}."
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


def _f4(one: Run, operator_type: str) -> str:
    found = data.shallow_deep(one.geometry, operator_type)
    assert found is not None
    text = f"{operator_type}: first layers against last ones (the paper's F4), which "
    text += "never change places." if found.crossing is None else "change places first at the "
    text += "" if found.crossing is None else f"dotted step {found.crossing}."
    if found.num_layers < 3:
        text += " The model has fewer than six layers: halves stand for three layers each."
    return text


def _norm_caption(one: Run) -> str:
    found = data.medians(one.geometry, data.operator_type, "update_norm")
    last = ", ".join(f"{name} {series[-1][1]:.3f}" for name, series in found.items())
    return (
        "Norm of what Newton-Schulz made of momentum over that of its exact polar factor, median "
        f"over the layers of a type; at the last tracked step {last}."
    )


# ---------------------------------------------------------------- tables


def _table(runs: Sequence[Run], rows: Sequence[tuple[str, Sequence[str | None]]]) -> Table:
    """A row for each figure that any run has, a column for each run."""
    shown = [(name, cells) for name, cells in rows if any(cell is not None for cell in cells)]
    header = ["", *(one.label for one in runs)]
    return Table(header, [[name, *(cell or NONE for cell in cells)] for name, cells in shown])


def _plan_table(runs: Sequence[Run]) -> Table | None:
    """What the plans gain in all."""
    found = [one for one in runs if one.plan is not None]
    columns = []
    for one in found:
        plan = one.plan
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
    if not columns:
        return None
    return _table(found, [(name, [one[name] for one in columns]) for name in columns[0]])


def _facts(runs: Sequence[Run]) -> Table:
    rows: list[tuple[str, Sequence[str | None]]] = [
        ("model", [_model(one) for one in runs]),
        ("optimizer", [one.config.get("optimizer", {}).get("name") for one in runs]),
        ("steps", [f"{one.metrics[-1]['step']:,}" for one in runs]),
        ("tokens", [_number(one.metrics[-1].get("num_tokens"), 1) for one in runs]),
        (
            "validation loss",
            [f"{v[-1][1]:.4f}" if (v := one.validations) else None for one in runs],
        ),
    ]
    work = [data.ns_work(one) for one in runs]
    mean = [None if one is None else f"{one.mean:.3f} ({one.unit})" for one in work]
    last = [None if one is None else f"{one.ratio[-1]:.3f} ({one.unit})" for one in work]
    rows.append(("Newton-Schulz work over uniform's, mean", mean))
    rows.append(("Newton-Schulz work over uniform's, at the end", last))
    taken = [data.cost(one) for one in runs]
    for field, (title, factor) in data.COSTS.items():
        rows.append((title, [_number(one[field], factor) for one in taken]))
    by_phase = [data.optimizer_seconds_by_phase(one) for one in runs]
    for phase in style.PHASES:
        cells = [_number(one.get(phase), 1e3) for one in by_phase]
        rows.append((f"optimizer in phase {phase} (ms)", cells))
    return _table(runs, rows)


def _model(one: Run) -> str | None:
    if one.geometry:
        return str(one.geometry[0].get("model", NONE))
    model = one.config.get("model", {})
    return f"{model['name']} {model['flavor']}" if model else None


def _number(value: float | None, factor: float) -> str | None:
    if value is None:
        return None
    value *= factor
    return f"{value:,.{0 if value >= 100 or value == int(value) else 2}f}"
