"""Figures F1 to F4 of the AMO paper, from the geometry log of a run."""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from amo_dist.config import sort_operator_types
from benchmarks.amo_paper.catalog import GEOMETRY_FILE
from benchmarks.amo_paper.static_schedule import NUMBER, read_geometry
from torchtitan_ext.tools.report import data
from torchtitan_ext.tools.report import figures as report
from torchtitan_ext.tools.report.data import Records, Run

KAPPA = r"condition number $\kappa$"

LAYERS = "cividis"
"""Colour map of depth; even in grey."""
DEPTH_TYPES = ("attn_q", "mlp_up")
"""Operator types whose depth the paper compares."""


_KINDS = {"step": int, "operator_type": str, "layer": (int, type(None))} | dict.fromkeys(
    ("kappa", "ns_residual"), NUMBER
)


@dataclasses.dataclass(frozen=True)
class Tracked(Run):
    """A run with the records of its geometry log."""

    geometry: Records


def add_commands(subparsers: Any) -> None:
    """Register ``figures``."""
    parser = subparsers.add_parser(
        "figures",
        help="draw F1 to F4 of the paper from a tracked run",
        description="Draw the paper's figures F1 to F4 from the geometry log of a run as PNG "
        "files, and print what each shows. Needs the extra 'plots'.",
    )
    parser.add_argument("run_folder", metavar="RUN", type=Path, help="folder of a run")
    parser.add_argument("-o", "--output", metavar="DIR", type=Path, default=Path("figures"))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Draw the figures for parsed arguments.

    Raises:
        ValueError: The run cannot be read, or has no geometry log.
    """
    geometry = read_geometry(args.run_folder / GEOMETRY_FILE, _KINDS)
    tracked = Tracked(**vars(data.load(args.run_folder)), geometry=geometry)
    args.output.mkdir(parents=True, exist_ok=True)
    with report.style():
        for name, figure, caption in draw(tracked):
            path = args.output / f"{name}.png"
            figure.savefig(path, dpi=200)
            print(f"{path}  {caption}")
    return 0


def draw(run: Tracked) -> Iterator[tuple[str, Any, str]]:
    """Name, figure and caption of each figure."""
    yield "f1", scatter(run), correlations(run)
    yield "f2", over_steps(run), shares(run)
    yield "f3", profile_over_depth(run), "Condition numbers of layers over depth."
    for name in DEPTH_TYPES:
        if groups := shallow_deep(run.geometry, name):
            step = groups.crossing
            crossing = "never cross" if step is None else f"cross at step {step}"
            caption = f"{name}: first and last {groups.num_layers} layers; they {crossing}."
            yield f"f4_{name}", shallow_and_deep(run, groups), caption


def correlations(run: Tracked) -> str:
    """Pearson's r of log10 kappa and the residual, in the whole run and by phase."""
    texts = []
    for phase, first, last in [("all", 0, math.inf), *run.spans("phase")]:
        records = [record for record in run.geometry if first <= record["step"] <= last]
        r = pearson([(x, y) for x, y, _ in conditioning(records)])
        texts += [] if r is None else [f"{phase} r = {r:.3f}"]
    return f"{', '.join(texts) or 'no r'} (the paper finds 0.67 to 0.91 over its eight models)."


def shares(run: Tracked) -> str:
    """Shares of the variance of log10 kappa that lie between operator types, and layers."""
    types = between_share(run.geometry, "operator_type")
    layers = between_share(run.geometry, "layer")
    if types is None or layers is None:
        return "Condition numbers do not vary."
    return (
        f"{types:.0%} of the variance of log kappa lies between types, {layers:.0%} between layers."
    )


def pearson(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Pearson's r; None for fewer than three pairs, or if one side does not vary."""
    if len(pairs) < 3:
        return None
    try:
        return statistics.correlation([x for x, _ in pairs], [y for _, y in pairs])
    except statistics.StatisticsError:
        return None


def between_share(records: Records, key: str) -> float | None:
    """Share of the variance of log10 kappa that lies between groups, averaged over steps.

    This is the squared correlation ratio: 1 if the matrices of a group are alike, 0 if the groups
    are.

    Args:
        records: Records of a geometry log.
        key: ``operator_type`` or ``layer``.
    """
    by_step: dict[int, dict[Any, list[float]]] = {}
    for record in records:
        if record.get("kappa") is not None and record.get(key) is not None:
            groups = by_step.setdefault(record["step"], {})
            groups.setdefault(record[key], []).append(math.log10(record["kappa"]))
    shares = []
    for groups in by_step.values():
        values = [value for group in groups.values() for value in group]
        mean = statistics.fmean(values)
        total = sum((value - mean) ** 2 for value in values)
        if total > 0:
            between = sum(len(g) * (statistics.fmean(g) - mean) ** 2 for g in groups.values())
            shares.append(between / total)
    return statistics.fmean(shares) if shares else None


@dataclasses.dataclass(frozen=True, slots=True)
class Depth:
    """Shallow against deep layers of one operator type.

    Attributes:
        num_layers: Layers in each of the two groups.
        crossing: First logged step at which the order differs from that of the first step.
    """

    num_layers: int
    shallow: list[tuple[int, float]]
    deep: list[tuple[int, float]]
    crossing: int | None


def shallow_deep(records: Records, name: str) -> Depth | None:
    """The first three layers against the last three, or halves of a model with fewer than six.

    Returns:
        None if the log has fewer than two layers of the type.
    """
    records = [r for r in records if r["operator_type"] == name]
    layers = sorted({r["layer"] for r in records if r["layer"] is not None})
    size = min(3, len(layers) // 2)
    if size == 0:
        return None
    side = dict.fromkeys(layers[:size], "shallow") | dict.fromkeys(layers[-size:], "deep")
    by_side = medians(records, lambda r: side.get(r["layer"]))
    shallow, deep = by_side.get("shallow", []), by_side.get("deep", [])
    return Depth(size, shallow, deep, first_crossing(shallow, deep))


def first_crossing(
    left: Sequence[tuple[int, float]], right: Sequence[tuple[int, float]]
) -> int | None:
    """First common step at which two trajectories meet, or have changed their order."""
    others = dict(right)
    signs = [
        (step, (value > others[step]) - (value < others[step]))
        for step, value in left
        if step in others
    ]
    return next((step for step, sign in signs if sign != signs[0][1]), None)


def conditioning(records: Records) -> list[tuple[float, float, int]]:
    """``(log10 kappa, normalised residual, layer)`` of each record that has all three."""
    return [
        (math.log10(record["kappa"]), record["ns_residual"], record["layer"])
        for record in records
        if all(record.get(key) is not None for key in ("kappa", "ns_residual", "layer"))
    ]


def scatter(run: Tracked) -> Any:
    """F1: condition number of the input against the residual of the result, by depth."""
    points = conditioning(run.geometry)
    figure, axes = report.new(3.5)
    random.Random(0).shuffle(points)  # so that no layer covers all others
    xs, ys, layers = zip(*points, strict=True)
    dots = axes.scatter([10**x for x in xs], ys, c=layers, cmap=LAYERS, s=13, alpha=0.75)
    residual = r"residual $\|M'M'^{\top}-I\|_F\,/\,\sqrt{\min(m,n)}$"
    axes.set(xscale="log", xlabel=f"{KAPPA} of momentum", ylabel=residual)
    axes.set_ylim(bottom=0)
    figure.colorbar(dots, ax=axes, label="layer", ticks=_few(sorted({*layers}), 8))
    return figure


def _few(values: Sequence[int], count: int) -> list[int]:
    """At most ``count`` of sorted values, evenly spread, both ends among them."""
    if len(values) <= count:
        return list(values)
    return [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]


def profile_over_depth(run: Tracked) -> Any:
    """F3: profiles over depth at a few steps."""
    from matplotlib import colormaps

    by_layer = medians(run.geometry, lambda record: record["layer"])
    figure, axes = report.new(3.5)
    snapshots = _few(sorted({step for series in by_layer.values() for step, _ in series}), 5)
    colors = colormaps["viridis_r"]
    for index, (step, marker) in enumerate(zip(snapshots, "osD^v", strict=False)):
        profile = [
            (number, dict(series)[step])
            for number, series in sorted(by_layer.items())
            if step in dict(series)
        ]
        tone = colors(0.1 + 0.9 * index / max(len(snapshots) - 1, 1))
        options = {"color": tone, "marker": marker, "markersize": 4.5}
        axes.plot(*report.columns(profile), **options, label=f"step {step}")
    axes.set(xlabel="layer", ylabel=f"median {KAPPA}", yscale="log")
    report.whole(axes)
    report.legend(figure, axes, columns=3)
    return figure


def shallow_and_deep(run: Tracked, groups: Depth) -> Any:
    """F4: shallow against deep layers of an operator type."""
    figure, axes = report.new()
    size = "layer" if groups.num_layers == 1 else f"{groups.num_layers} layers"
    for series, label, tone, dashes, marker in (
        (groups.shallow, f"first {size}", report.COLORS[0], "-", "o"),
        (groups.deep, f"last {size}", report.COLORS[1], (0, (5, 2)), "s"),
    ):
        options = {"color": tone, "linestyle": dashes, "marker": marker, "markersize": 3.6}
        axes.plot(*report.columns(series), **options, label=label)
    if groups.crossing is not None:
        axes.axvline(groups.crossing, color="#444444", lw=1, ls=":")
    report.over_steps(axes, [run], ylabel=f"median {KAPPA}", yscale="log")
    report.legend(figure, axes)
    return figure


def over_steps(run: Tracked) -> Any:
    """Median condition number of each operator type."""
    by_type = medians(run.geometry, lambda record: record["operator_type"])
    if not by_type:
        return None
    figure, axes = report.new(3.5)
    for index, name in enumerate(sort_operator_types(by_type)):
        axes.plot(*report.columns(by_type[name]), **report.line(index, name))
    report.over_steps(axes, [run], ylabel=f"median {KAPPA}", yscale="log")
    report.shade(axes, run)
    report.legend(figure, axes)
    return figure


def medians(
    records: Records, key: Callable[[Mapping[str, Any]], Any]
) -> dict[Any, list[tuple[int, float]]]:
    """``(step, median of kappa over the step's records)``, by a key of the records."""
    values: dict[Any, dict[int, list[float]]] = {}
    for record in records:
        group = key(record)
        if record.get("kappa") is not None and group is not None:
            values.setdefault(group, {}).setdefault(record["step"], []).append(record["kappa"])
    return {
        group: [(step, statistics.median(kappas)) for step, kappas in sorted(by_step.items())]
        for group, by_step in values.items()
    }
