"""The figures of a report; each answers None where a run lacks what it shows."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

from amo_dist.config import sort_operator_types
from amo_dist.schedule.plan_table import errors_beside_uniform
from torchtitan_ext.tools.report import data, style
from torchtitan_ext.tools.report.data import Run

KAPPA = r"condition number $\kappa$"
GUARD = "newton_schulz/residual"
CURVES = {
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "optimizer/steps_skipped": "skipped steps, in all",
    GUARD: "residual of the guard",
    "data_seconds_per_step": "waits for data (s a step)",
    "tokens_per_second": "tokens a second",
    "mfu_percent": "model flops utilization (%)",
}
"""Titles of small pictures by what they show."""
DEPTH_TYPES = ("attn_q", "mlp_up")
"""Operator types whose depth the AMO paper compares."""


def _new(width: float = 8.0, height: float = 3.6, **options: Any) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)  # type: ignore[union-attr, call-arg]
    return figure, figure.subplots(**options)


def _legend_right(figure: Any, axes: Any, columns: int = 1) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", ncols=columns)


def _whole(axes: Any) -> None:
    """Whole numbers only, on an axis of steps or layers."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))


def _over_steps(axes: Any, runs: Sequence[Run], **labels: str) -> None:
    """Optimizer steps along ``x``, to the end of the longest run."""
    axes.set(**{"xlabel": "optimizer step", **labels})
    axes.set_xlim(0, max(run.metrics[-1]["step"] for run in runs) * 1.01)
    _whole(axes)


def _places(run: Run, field: str, name: str = "") -> list[tuple[Any, int, int]]:
    """``(value, left, right)`` of each stretch of one value: from its first step to the next's."""
    spans = run.spans(field, name)
    edges = [0, *(first for _, first, _ in spans[1:]), run.metrics[-1]["step"]]
    return [(span[0], *ends) for span, ends in zip(spans, itertools.pairwise(edges), strict=False)]


def _shade(axes: Any, run: Run, *, named: bool = True) -> None:
    """Backgrounds for phases, named on top."""
    for phase, left, right in _places(run, "phase"):
        axes.axvspan(left, right, color=style.PHASES.get(phase, "#FFFFFF"), zorder=-2, lw=0)
        if left:
            axes.axvline(left, color="#777777", lw=0.9, ls=(0, (2, 2)), zorder=1)
        axes.annotate(
            phase if named else "",
            ((left + right) / 2, 1.0),
            xycoords=axes.get_xaxis_transform(),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=8.5,
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
    if len(runs) > 1 or runs[0].validations:
        axes.legend()
    _over_steps(axes, runs, ylabel="loss (nats per token)")
    return figure


def curves(runs: Sequence[Run]) -> Any:
    """Small pictures of what :data:`CURVES` names, as far as any run has it."""
    found = {key: [run.series(key) for run in runs] for key in CURVES}
    # 0 before the first measurement.
    found[GUARD] = [[point for point in series if point[1]] for series in found[GUARD]]
    shown = {key: series for key, series in found.items() if any(series)}
    if not shown:
        return None
    rows = -(-len(shown) // 2)
    figure, axes = _new(9.0, 1.7 * rows + 0.2, nrows=rows, ncols=2, squeeze=False)
    for ax, (key, by_run) in zip(axes.flat, shown.items(), strict=False):
        for index, (run, series) in enumerate(zip(runs, by_run, strict=True)):
            ax.plot(*_columns(series), **style.run_line(index), label=run.label)
        if len(runs) == 1:
            _shade(ax, runs[0], named=False)
        ax.set_title(CURVES[key])
        ax.set_ylim(0, None if any(value for one in by_run for _, value in one) else 1)
        _over_steps(ax, runs, xlabel="")
    if len(runs) > 1:
        axes.flat[0].legend()
    if len(shown) % 2:
        axes.flat[-1].set_axis_off()
    return figure


def _columns(series: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [step for step, _ in series], [value for _, value in series]


def timeline(run: Run) -> Any:
    """Newton-Schulz steps of each operator type: a row each, a bar for every stretch of steps."""
    types = sort_operator_types(run.metrics[-1]["num_steps_by_type"])
    if not types:
        return None
    rows = [_places(run, "num_steps_by_type", name) for name in types]
    counts, end = [count for row in rows for count, _, _ in row], run.metrics[-1]["step"]
    figure, axes = _new(8.0, 0.38 * len(types) + 1.1)
    low, high = min(3, *counts), max(7, *counts)
    colors = _shades(high - low + 1)
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm

    norm = BoundaryNorm([low - 0.5 + i for i in range(high - low + 2)], colors.N)
    for y, row in enumerate(rows):
        for value, left, right in row:
            # One bar for a stretch: cells side by side would show seams.
            axes.barh(y, right - left, left=left, height=0.9, color=colors(norm(value)), lw=0)
            if right - left > 0.035 * end:
                tone = "white" if value > (low + high) / 2 else "#222222"
                axes.text(
                    (left + right) / 2, y, str(value), ha="center", va="center", color=tone, size=9
                )
    axes.set_ylim(len(types) - 0.5, -0.5)
    axes.set_yticks(range(len(types)), types)
    for tick, name in zip(axes.get_yticklabels(), types, strict=True):
        tick.set_color(style.color(name, types))
        tick.set_fontweight("bold")
    axes.grid(False)
    _shade(axes, run)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_xlabel("optimizer step")
    axes.set_xlim(0, end)
    _whole(axes)
    bar = figure.colorbar(
        ScalarMappable(norm, colors), ax=axes, ticks=range(low, high + 1), pad=0.02, aspect=14
    )
    bar.set_label("Newton-Schulz steps")
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0)
    return figure


def _shades(count: int) -> Any:
    """Light to dark blue: more steps, more ink, in print as well."""
    from matplotlib.colors import LinearSegmentedColormap

    ends = LinearSegmentedColormap.from_list("steps", ["#E4EEF6", "#6FA8D0", "#0B3C66"])
    return ends.resampled(count)


def plan(run: Run) -> Any:
    """The error of each operator type under the uniform schedule and under the last plan."""
    if run.plan is None:
        return None
    found, types = run.plan, run.plan.operator_types
    before, after = errors_beside_uniform(found)
    figure, axes = _new(8.0, 0.5 * len(types) + 1.2)
    places = range(len(types))
    axes.barh([y - 0.2 for y in places], before, height=0.36, color="#BBBBBB")
    colors = [style.color(name, types) for name in types]
    axes.barh([y + 0.2 for y in places], after, height=0.36, color=colors)
    for y, old, new, steps in zip(places, before, after, found.allocation, strict=True):
        for where, value, count in ((y - 0.2, old, found.base_steps), (y + 0.2, new, steps)):
            axes.annotate(
                f"{value:.3f}, {count} steps",
                (value, where),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8.5,
            )
    axes.set_ylim(len(types) - 0.5, -0.5)
    axes.set_yticks(places, types)
    axes.set_xlim(0, 1.2 * max(*before, *after, 1e-3))
    axes.set_xlabel(found.error_name)
    axes.grid(False, axis="y")
    return figure


def ells(run: Run) -> Any:
    """Observed ``ell`` of each operator type, and the last plan's targets."""
    types = [name for name in run.operator_types if run.series(f"amo/ell/{name}")]
    if not types:
        return None
    figure, axes = _new()
    for name in types:
        series = run.series(f"amo/ell/{name}")
        # Before the first observation there is only the base value.
        changes = [b for a, b in itertools.pairwise(series) if b[1] != a[1]] or series[-1:]
        steps, values = zip(*changes, strict=True)
        axes.plot(steps, values, **style.line(name, run.operator_types))
    last = run.metrics[-1]["step"]
    if run.plan is not None:
        for name, target in zip(run.plan.operator_types, run.plan.ell_target, strict=True):
            tone = style.color(name, run.operator_types)
            axes.plot(
                [last * 1.02], [target], marker="<", color=tone, clip_on=False, markersize=7, ls=""
            )
            axes.axhline(target, color=tone, lw=0.8, ls=":")
        axes.axhline(run.plan.base_ell, color="#999999", lw=1)
        axes.annotate(
            r"$\ell_\mathrm{base}$",
            (0.97, run.plan.base_ell),
            xycoords=axes.get_yaxis_transform(),
            xytext=(0, -3),
            textcoords="offset points",
            ha="right",
            va="top",
            fontsize=9,
            color="#666666",
        )
    axes.set_yscale("log")
    axes.set_xlim(0, last * 1.02)
    axes.set(xlabel="optimizer step", ylabel=r"effective $\ell$ (median of a type)")
    _shade(axes, run)
    _whole(axes)
    _legend_right(figure, axes)
    return figure


def scatter(run: Run) -> Any:
    """F1: condition number of the input against the residual of the result, by depth."""
    points = data.conditioning(run.geometry)
    if len(points) < 3:
        return None
    r = data.pearson([(x, y) for x, y, _ in points])
    figure, axes = _new(6.4, 4.2)
    layers = sorted({layer for _, _, layer in points})
    random.Random(0).shuffle(points)  # depth must not decide what covers what
    found = axes.scatter(
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
    text = f"Pearson r = {'n/a' if r is None else f'{r:.3f}'}   (n = {len(points):,})"
    axes.set_title(text)
    bar = figure.colorbar(found, ax=axes, pad=0.02, ticks=_few(layers, 8))
    bar.set_label("layer")
    bar.outline.set_visible(False)
    bar.solids.set_alpha(1)
    return figure


def type_medians(run: Run) -> Any:
    """F2: the median condition number of each operator type."""
    return _by_type(run, "kappa", ylabel=f"median {KAPPA}", yscale="log")


def update_norms(run: Run) -> Any:
    """The median norm of what Newton-Schulz made of each operator type, over an exact factor's."""
    return _by_type(run, "update_norm", ylabel=r"median $\|M'\|_F\,/\,\sqrt{\min(m,n)}$")


def _by_type(run: Run, field: str, **axis: str) -> Any:
    found = data.medians(run.geometry, lambda record: record["operator_type"], field)
    if not found:
        return None
    figure, axes = _new()
    for name in sort_operator_types(found):
        steps, values = zip(*found[name], strict=True)
        axes.plot(steps, values, **style.line(name, run.operator_types))
    _over_steps(axes, [run], **axis)
    _shade(axes, run)
    _legend_right(figure, axes)
    return figure


def layer_profiles(run: Run) -> Any:
    """F3: medians of layers over time, and profiles over depth at a few steps."""
    found = data.medians(run.geometry, lambda record: record["layer"])
    if len(found) < 2:
        return None
    import matplotlib

    figure, (left, right) = _new(9.0, 3.7, ncols=2, sharey=True)
    layers = sorted(found)
    colors = matplotlib.colormaps[style.LAYERS]
    for layer in _few(layers, 6):
        steps, values = zip(*found[layer], strict=True)
        depth = layers.index(layer) / max(len(layers) - 1, 1)
        left.plot(steps, values, color=colors(depth * 0.92), label=f"layer {layer}")
    _over_steps(left, [run], ylabel=f"median {KAPPA}", yscale="log")
    left.set_title("layers over training")
    left.legend()
    snapshots = _few(sorted({step for series in found.values() for step, _ in series}), 5)
    greys = matplotlib.colormaps["viridis_r"]
    for index, (step, marker) in enumerate(zip(snapshots, "osD^v", strict=False)):
        profile = [
            (layer, dict(found[layer])[step]) for layer in layers if step in dict(found[layer])
        ]
        x, y = zip(*profile, strict=True)
        tone = greys(0.1 + 0.9 * index / max(len(snapshots) - 1, 1))
        right.plot(x, y, color=tone, marker=marker, markersize=4.5, label=f"step {step}")
    right.set_xlabel("layer")
    right.set_title("profile over depth")
    right.legend()
    _whole(right)
    return figure


def depth(run: Run) -> Any:
    """F4: shallow against deep layers of two operator types."""
    found = {name: data.shallow_deep(run.geometry, name) for name in DEPTH_TYPES}
    shown = {name: one for name, one in found.items() if one is not None and one.shallow}
    if not shown:
        return None
    figure, axes = _new(9.0, 3.6, ncols=len(shown), squeeze=False)
    for ax, (name, one) in zip(axes[0], shown.items(), strict=True):
        size = "layer" if one.num_layers == 1 else f"{one.num_layers} layers"
        for series, label, tone, dashes, marker in (
            (one.shallow, f"first {size}", style.SHALLOW, "-", "o"),
            (one.deep, f"last {size}", style.DEEP, (0, (5, 2)), "s"),
        ):
            x, y = zip(*series, strict=True)
            ax.plot(x, y, color=tone, linestyle=dashes, marker=marker, markersize=3.6, label=label)
        if one.crossing is not None:
            ax.axvline(one.crossing, color="#444444", lw=1, ls=":")
        crossing = "n/a" if one.crossing is None else f"step {one.crossing}"
        ax.set_title(f"{name}    cross = {crossing}")
        _over_steps(ax, [run], yscale="log")
        ax.legend()
    axes[0][0].set_ylabel(f"median {KAPPA}")
    return figure


def work(runs: Sequence[Run]) -> Any:
    """Newton-Schulz work of each run against the uniform schedule."""
    found = [(run, one) for run in runs if (one := data.ns_work(run)) is not None]
    if not found:
        return None
    figure, axes = _new(8.0, 3.0)
    for index, (run, one) in enumerate(found):
        label = f"{run.label}: {one.mean:.3f} on average ({one.unit})"
        ratio = [one.ratio[0], *one.ratio]
        line = {**style.run_line(index), "label": label, "drawstyle": "steps-pre"}
        axes.plot([0, *one.steps], ratio, **line)
    axes.axhline(1.0, color="#999999", lw=1.2, ls=(0, (2, 2)), label="uniform schedule")
    ratios = [value for _, one in found for value in one.ratio]
    axes.set_ylim(min(0.9, min(ratios) - 0.05), max(1.1, max(ratios) + 0.05))
    _over_steps(axes, runs, ylabel="work / uniform work")
    axes.legend()
    return figure


def _few(values: Sequence[int], count: int) -> list[int]:
    """At most ``count`` of sorted values, evenly spread, both ends among them."""
    if len(values) <= count:
        return list(values)
    return [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]
