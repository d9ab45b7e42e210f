"""The figures of a report; None if a run lacks the data."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from amo_dist.config import sort_operator_types
from torchtitan_ext.tools.report.data import Run

PHASES = {"observation": "#EAF2F8", "transition": "#FDF1DC"}
"""Background of a phase; others have none."""

# Okabe and Ito's palette, which any colour vision can distinguish; and dashes, so that both of two
# coincident lines, such as those of gate and up, are visible.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#333333")
DASHES: Sequence[Any] = ("-", "--", "-.", ":")

_RC: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E3E3E3",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.hashsalt": "amo",
}


def style() -> contextlib.AbstractContextManager[None]:
    """The style of figures, whatever the user's own settings of matplotlib."""
    import matplotlib.style

    return matplotlib.style.context(_RC, after_reset=True)


def new(height: float = 3.1, **axes: Any) -> tuple[Any, Any]:
    """A figure as narrow as a phone, so that its text is readable there, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.0, height), layout="constrained")
    return figure, figure.subplots(**axes)


def legend(figure: Any, axes: Any, columns: int = 4) -> None:
    """Put the legend below the picture, where it covers nothing."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def whole(axes: Any) -> None:
    """Put whole numbers on the x axis, of steps or layers."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))


def over_steps(axes: Any, runs: Sequence[Run], **labels: str) -> None:
    """Put optimizer steps on the x axis, up to the end of the longest run."""
    axes.set(**{"xlabel": "optimizer step", **labels})
    axes.set_xlim(0, max(run.metrics[-1]["step"] for run in runs) * 1.01)
    whole(axes)


def columns(series: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """Steps, and values."""
    return [step for step, _ in series], [value for _, value in series]


def line(index: int, label: str) -> dict[str, Any]:
    """Options of a line; two equal lines are both visible."""
    dashes = DASHES[index % len(DASHES)]
    return {"color": COLORS[index % len(COLORS)], "linestyle": dashes, "label": label}


def shade(axes: Any, run: Run, is_named: bool = True) -> None:
    """Backgrounds for phases, named on top where there is room."""
    for phase, first, last in run.spans("phase"):
        axes.axvspan(first, last + 1, color=PHASES.get(phase, "#FFFFFF"), zorder=-2, lw=0)
        if is_named and last - first > 0.017 * len(phase) * run.metrics[-1]["step"]:
            place = ((first + last) / 2, 1.02)
            axes.annotate(phase, place, xycoords=axes.get_xaxis_transform(), ha="center")


PANELS = (
    ("loss", "loss"),
    ("learning rate", "lr"),
    ("gradient norm", "grad_norm"),
    ("tokens per second", "tokens_per_second"),
)
"""Label, and field of the records of each panel of `training`."""


def training(runs: Sequence[Run]) -> Any:
    """Loss, rate, gradient norm and speed of every run, and the loss of its validations."""
    panels = [panel for panel in PANELS if any(run.series(panel[1]) for run in runs)]
    figure, rows = new(1.6 * len(panels) + 0.9, nrows=len(panels), sharex=True, squeeze=False)
    for (label, field), (axes,) in zip(panels, rows, strict=True):
        for index, run in enumerate(runs):
            axes.plot(*columns(run.series(field)), **line(index, run.label))
            if field == "loss" and run.validations:
                dots = {**line(index, f"{run.label}, validation"), "linestyle": "", "marker": "o"}
                axes.plot(*columns(run.validations), **dots)
        if len(runs) == 1:
            shade(axes, runs[0], is_named=field == PANELS[0][1])
        over_steps(axes, runs, ylabel=label, xlabel="")
    rows[-1][0].set_xlabel("optimizer step")
    legend(figure, rows[0][0], columns=2)
    return figure


def schedule(run: Run) -> Any:
    """Newton-Schulz steps of each operator type: a row of bars, one for every stretch of steps.

    None if they never change: the page prints the number then.
    """
    import matplotlib

    types = sort_operator_types(run.metrics[-1]["num_steps_by_type"])
    rows = [run.spans("num_steps_by_type", name) for name in types]
    if not any(len(row) > 1 for row in rows):
        return None
    counts, end = [count for row in rows for count, _, _ in row], run.metrics[-1]["step"]
    low, high = min(3, *counts), max(7, *counts)
    figure, axes = new(0.32 * len(types) + 0.9)
    for y, row in enumerate(rows):
        for count, first, last in row:
            blue = matplotlib.colormaps["Blues"](0.15 + 0.75 * (count - low) / (high - low))
            axes.barh(y, last + 1 - first, left=first, height=0.9, color=blue, lw=0)
            if last - first > 0.03 * end:
                tone = "white" if count > (low + high) / 2 else "#222222"
                axes.text((first + last) / 2, y, str(count), ha="center", va="center", color=tone)
    axes.set_ylim(len(types) - 0.5, -0.5)
    axes.set_yticks(range(len(types)), types)
    axes.grid(False)
    shade(axes, run)
    over_steps(axes, [run])
    return figure
