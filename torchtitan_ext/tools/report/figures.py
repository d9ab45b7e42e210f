"""The figures of a report, one pair of axes each; None if a run lacks the data."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

from amo_dist.config import sort_operator_types
from amo_dist.schedule.plan import errors_beside_uniform
from torchtitan_ext.tools.report import data, style
from torchtitan_ext.tools.report.data import Run

KAPPA = r"condition number $\kappa$"


def _new(height: float = 3.1, **axes: Any) -> tuple[Any, Any]:
    """A figure as narrow as a phone, so that its text is readable there, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.0, height), layout="constrained")
    return figure, figure.subplots(**axes)


def _legend(figure: Any, axes: Any, columns: int = 4) -> None:
    """Put the legend below the picture, where it covers nothing."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def _plain(axis: Any) -> None:
    """Print numbers in full, without a common factor in a corner."""
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))


def _whole(axes: Any) -> None:
    """Put whole numbers on the x axis, of steps or layers."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    _plain(axes.xaxis)


def _over_steps(axes: Any, runs: Sequence[Run], **labels: str) -> None:
    """Put optimizer steps on the x axis, up to the end of the longest run."""
    axes.set(**{"xlabel": "optimizer step", **labels})
    axes.set_xlim(0, max(run.metrics[-1]["step"] for run in runs) * 1.01)
    _whole(axes)
    if axes.get_yscale() == "linear":
        _plain(axes.yaxis)


def _places(run: Run, field: str, name: str = "") -> list[tuple[Any, int, int]]:
    """``(value, left, right)`` of each stretch of one value: from its first step to the next's."""
    spans = run.spans(field, name)
    edges = [0, *(first for _, first, _ in spans[1:]), run.metrics[-1]["step"]]
    return [(span[0], *ends) for span, ends in zip(spans, itertools.pairwise(edges), strict=False)]


def _shade(axes: Any, run: Run) -> None:
    """Backgrounds for phases, named on top where there is room."""
    for phase, left, right in _places(run, "phase"):
        axes.axvspan(left, right, color=style.PHASES.get(phase, "#FFFFFF"), zorder=-2, lw=0)
        if left:
            axes.axvline(left, color="#777777", lw=0.9, ls=(0, (2, 2)), zorder=1)
        if right - left > 0.017 * len(phase) * run.metrics[-1]["step"]:
            axes.annotate(
                phase,
                ((left + right) / 2, 1.0),
                xycoords=axes.get_xaxis_transform(),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                va="bottom",
                fontsize=9,
                color="#555555",
            )


def losses(runs: Sequence[Run]) -> Any:
    """Training loss of every run, and the loss of its validations."""
    figure, axes = _new()
    for index, run in enumerate(runs):
        line = style.run_line(index)
        axes.plot(*_columns(run.series("loss")), **line, label=run.label)
        if run.validations:
            dots = {**line, "linestyle": ":", "marker": "o", "markersize": 3.6}
            axes.plot(*_columns(run.validations), **dots, label=f"{run.label}, validation")
    if len(runs) == 1:
        _shade(axes, runs[0])
    _over_steps(axes, runs, ylabel="loss (nats per token)")
    if len(runs) > 1 or runs[0].validations:
        _legend(figure, axes, columns=2)
    return figure


def _columns(series: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [step for step, _ in series], [value for _, value in series]


def timeline(run: Run) -> Any:
    """Newton-Schulz steps of each operator type, and the learning rate below them.

    Each type has a row, with a bar for every stretch of steps. None if they never change: the page
    prints the number then.
    """
    types = sort_operator_types(run.metrics[-1]["num_steps_by_type"])
    rows = [_places(run, "num_steps_by_type", name) for name in types]
    if not any(len(row) > 1 for row in rows):
        return None
    counts, end = [count for row in rows for count, _, _ in row], run.metrics[-1]["step"]
    height, rates = 0.32 * len(types) + 0.8, run.series("lr")
    if rates:
        ratios = {"height_ratios": [height, 1.1]}
        figure, (axes, bottom) = _new(height + 1.1, nrows=2, sharex=True, gridspec_kw=ratios)
        bottom.plot(*_columns(rates), color="#444444")
        bottom.set(ylabel="learning rate", ylim=(0, None))
        _plain(bottom.yaxis)
    else:
        figure, axes = _new(height)
        bottom = axes
    low, high = min(3, *counts), max(7, *counts)
    colors = _shades(high - low + 1)
    for y, row in enumerate(rows):
        for value, left, right in row:
            # One bar per stretch, because adjacent cells would show seams.
            axes.barh(y, right - left, left=left, height=0.9, color=colors(value - low), lw=0)
            if right - left > 0.03 * end:
                tone = "white" if value > (low + high) / 2 else "#222222"
                axes.text((left + right) / 2, y, str(value), ha="center", va="center", color=tone)
    axes.set_ylim(len(types) - 0.5, -0.5)
    axes.set_yticks(range(len(types)), types)
    for tick, name in zip(axes.get_yticklabels(), types, strict=True):
        tick.set_color(style.color(name, types))
        tick.set_fontweight("bold")
    axes.grid(False)
    _shade(axes, run)
    for spine in axes.spines.values():
        spine.set_visible(False)
    bottom.set_xlabel("optimizer step")
    axes.set_xlim(0, end)
    _whole(bottom)
    return figure


def _shades(count: int) -> Any:
    """Light to dark blue: more steps are darker, in grey print as well."""
    from matplotlib.colors import LinearSegmentedColormap

    ends = LinearSegmentedColormap.from_list("steps", ["#E4EEF6", "#6FA8D0", "#0B3C66"])
    return ends.resampled(count)


def plan(run: Run) -> Any:
    """The error of each operator type under the uniform schedule and under the last plan."""
    if run.plan is None:
        return None
    types = run.plan.operator_types
    before, after = errors_beside_uniform(run.plan)
    figure, axes = _new(0.5 * len(types) + 0.8)
    places = range(len(types))
    axes.barh([y - 0.2 for y in places], before, height=0.36, color="#BBBBBB")
    colors = [style.color(name, types) for name in types]
    axes.barh([y + 0.2 for y in places], after, height=0.36, color=colors)
    for y, old, new, steps in zip(places, before, after, run.plan.allocation, strict=True):
        for height, value, count in ((y - 0.2, old, run.plan.base_steps), (y + 0.2, new, steps)):
            axes.annotate(
                f"{value:.3f}, {count} steps",
                (value, height),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
            )
    axes.set_ylim(len(types) - 0.5, -0.5)
    axes.set_yticks(places, types)
    axes.set_xlim(0, 1.4 * max(*before, *after, 1e-3))
    axes.set_xlabel(run.plan.error_name)
    axes.grid(False, axis="y")
    return figure


def ells(run: Run) -> Any:
    """Observed ``ell`` of each operator type, and the last plan's targets."""
    types = [name for name in run.operator_types if run.series(f"amo/ell/{name}")]
    if not types:
        return None
    figure, axes = _new(3.5)
    for name in types:
        series = run.series(f"amo/ell/{name}")
        # Before the first observation there is only the base value.
        changes = [b for a, b in itertools.pairwise(series) if b[1] != a[1]] or series[-1:]
        steps, values = zip(*changes, strict=True)
        axes.plot(steps, values, **style.line(name, run.operator_types))
    if run.plan is not None:
        for name, target in zip(run.plan.operator_types, run.plan.ell_target, strict=True):
            tone = style.color(name, run.operator_types)
            axes.axhline(target, color=tone, lw=0.8, ls=":")
    axes.set_yscale("log")
    _over_steps(axes, [run], ylabel=r"effective $\ell$ (median of a type)")
    _shade(axes, run)
    _legend(figure, axes)
    return figure


def scatter(run: Run) -> Any:
    """Condition number of the input against the residual of the result, by depth."""
    points = data.conditioning(run.geometry)
    if len(points) < 3:
        return None
    figure, axes = _new(3.5)
    layers = sorted({layer for _, _, layer in points})
    random.Random(0).shuffle(points)  # so that no layer covers all others
    dots = axes.scatter(
        [10**x for x, _, _ in points],
        [y for _, y, _ in points],
        c=[layer for _, _, layer in points],
        cmap=style.LAYERS,
        s=13,
        alpha=0.75,
        linewidths=0,
        rasterized=True,
    )
    axes.set_xscale("log")
    axes.set(
        xlabel=f"{KAPPA} of momentum",
        ylabel=r"residual $\|M'M'^{\top}-I\|_F\,/\,\sqrt{\min(m,n)}$",
    )
    axes.set_ylim(bottom=0)
    bar = figure.colorbar(dots, ax=axes, pad=0.02, ticks=_few(layers, 8))
    bar.set_label("layer")
    bar.outline.set_visible(False)
    bar.solids.set_alpha(1)
    return figure


def type_medians(run: Run) -> Any:
    """Median condition number of each operator type."""
    return _by_type(run, "kappa", ylabel=f"median {KAPPA}", yscale="log")


def update_norms(run: Run) -> Any:
    """Median norm of orthogonalized momentum by type, relative to the exact polar factor."""
    return _by_type(run, "update_norm", ylabel=r"median $\|M'\|_F\,/\,\sqrt{\min(m,n)}$")


def _by_type(run: Run, field: str, **axis: str) -> Any:
    by_type = data.medians(run.geometry, data.operator_type, field)
    if not by_type:
        return None
    figure, axes = _new(3.5)
    for name in sort_operator_types(by_type):
        axes.plot(*_columns(by_type[name]), **style.line(name, run.operator_types))
    _over_steps(axes, [run], **axis)
    _shade(axes, run)
    _legend(figure, axes)
    return figure


def work(runs: Sequence[Run]) -> Any:
    """Newton-Schulz work of each run against the uniform schedule; None if it never changes."""
    works = [(run, work) for run in runs if (work := data.ns_work(run)) is not None]
    if not any(len(set(work.ratio)) > 1 for _, work in works):
        return None
    figure, axes = _new(2.6)
    for index, (run, work) in enumerate(works):
        line = {**style.run_line(index), "label": run.label, "drawstyle": "steps-pre"}
        axes.plot([0, *work.steps], [work.ratio[0], *work.ratio], **line)
    axes.axhline(1.0, color="#999999", lw=1.2, ls=(0, (2, 2)), label="uniform schedule")
    ratios = [value for _, work in works for value in work.ratio]
    axes.set_ylim(min(0.9, min(ratios) - 0.05), max(1.1, max(ratios) + 0.05))
    _over_steps(axes, runs, ylabel="work / uniform work")
    _legend(figure, axes, columns=2)
    return figure


def _few(values: Sequence[int], count: int) -> list[int]:
    """At most ``count`` of sorted values, evenly spread, both ends among them."""
    if len(values) <= count:
        return list(values)
    return [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]
