"""Tables and plots of the runs and of the held-out scores."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.plan_quality.model import ARCHITECTURES
from benchmarks.plan_quality.variants import BASELINE, VARIANTS

UNIFORM, PAPER, MEASURED = "uniform PE", "paper, flops", "measured, flops 1.0"
"""Scores at equal flops."""
METRICS = ("residual", "distance")

Runs = dict[str, dict[str, dict[int, dict[str, Any]]]]
"""Records by architecture, by variant or plan, by seed."""


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half of its 95 % confidence interval by Student's t; NaN for one value."""
    from scipy import stats

    num = len(values)
    if num < 2:
        return statistics.fmean(values), math.nan
    error = statistics.stdev(values) / math.sqrt(num)
    return statistics.fmean(values), float(stats.t.ppf(0.975, num - 1)) * error


def differences(values: Mapping[int, float], baseline: Mapping[int, float]) -> list[float]:
    """``values - baseline`` for the seeds that both have."""
    return [values[seed] - baseline[seed] for seed in sorted(values.keys() & baseline.keys())]


def read_runs(folder: Path) -> Runs:
    """The records of ``train``."""
    runs: Runs = defaultdict(lambda: defaultdict(dict))
    for record in _records(folder / "runs"):
        runs[record["architecture"]][record["variant"]][record["seed"]] = record
    return runs


def read_scores(folder: Path) -> Runs:
    """The records of ``score``."""
    scores: Runs = defaultdict(lambda: defaultdict(dict))
    for record in _records(folder / "held_out"):
        for plan, found in record["plans"].items():
            scores[record["architecture"]][plan][record["seed"]] = found
    return scores


def _records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def final_loss(record: Mapping[str, Any]) -> float:
    return float(record["validation_loss"][str(len(record["train_loss"]))])


def ordered(found: Iterable[str], order: Iterable[str]) -> list[str]:
    """Those of ``order`` that were found, then the others."""
    first = [name for name in order if name in set(found)]
    return first + sorted(set(found) - set(first))


def plus_minus(values: Sequence[float], sign: str = "") -> str:
    if not values:
        return ""
    mean, half = interval(values)
    return f"{mean:{sign}.4f} ± {half:.4f}" if math.isfinite(half) else f"{mean:{sign}.4f}"


def _head(titles: str) -> list[str]:
    columns = titles.split(", ")
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]


def loss_table(runs: Runs) -> list[str]:
    """Markdown: final validation loss by architecture and variant, and flops."""
    lines = _head(
        "attention, optimizer, seeds, validation loss, against Muon-PE uniform, flops, "
        "flops once locked, steps by type (seeds)"
    )
    for architecture in ordered(runs, ARCHITECTURES):
        by_variant = runs[architecture]
        losses = {v: {s: final_loss(r) for s, r in some.items()} for v, some in by_variant.items()}
        for variant in ordered(by_variant, VARIANTS):
            records = by_variant[variant]
            gap = differences(losses[variant], losses.get(BASELINE, {}))
            flops, locked = (
                statistics.fmean(record[key] for record in records.values())
                for key in ("flops", "flops_locked")
            )
            title = VARIANTS[variant].title if variant in VARIANTS else variant
            lines.append(
                f"| {architecture} | {title} | {len(records)} "
                f"| {plus_minus([*losses[variant].values()])} "
                f"| {'' if variant == BASELINE else plus_minus(gap, '+')} "
                f"| {flops:.3f} | {locked:.3f} | {_allocations(records.values())} |"
            )
    return lines


def _allocations(records: Iterable[Mapping[str, Any]]) -> str:
    counts = Counter(tuple(record["allocation"].values()) for record in records)
    return ", ".join(
        f"{' '.join(map(str, steps))} ({num})" for steps, num in counts.most_common(3) if steps
    )


def score_table(scores: Runs) -> list[str]:
    """Markdown: held-out residual and distance by architecture and plan, flops and steps."""
    lines = _head(
        "attention, plan, residual, against uniform, distance, against uniform, flops, "
        "worst type: residual"
    )
    for architecture in ordered(scores, ARCHITECTURES):
        for plan, by_seed in scores[architecture].items():
            cells = []
            for metric in METRICS:
                values, base = (
                    {seed: found[metric] for seed, found in some.items()}
                    for some in (by_seed, scores[architecture].get(UNIFORM, {}))
                )
                gap = "" if plan == UNIFORM else plus_minus(differences(values, base), "+")
                cells += [plus_minus([*values.values()]), gap]
            flops = statistics.fmean(found["flops"] for found in by_seed.values())
            cells += [f"{flops:.3f}", _worst_type([*by_seed.values()])]
            lines.append(f"| {architecture} | {plan} | {' | '.join(cells)} |")
    return lines


def _worst_type(found: Sequence[Mapping[str, Any]]) -> str:
    """The operator type of the greatest residual, mean over seeds."""
    kinds = found[0]["by_type"]
    means = {k: statistics.fmean(f["by_type"][k]["residual"] for f in found) for k in kinds}
    worst = max(means, key=lambda kind: means[kind])
    return f"{worst}: {means[worst]:.2f}"


def verdict(scores: Runs) -> list[str]:
    """Which plan is to be the default, by the held-out distance at equal flops."""
    compared = {
        architecture: {
            plan: statistics.fmean(found["distance"] for found in plans[plan].values())
            for plan in (PAPER, MEASURED)
        }
        for architecture, plans in scores.items()
        if PAPER in plans and MEASURED in plans
    }
    if not compared:
        return []
    wins = [name for name, mean in compared.items() if mean[PAPER] < mean[MEASURED]]
    winner = "the paper's plan" if len(wins) >= 2 else "the measured plan"
    named = f" ({', '.join(sorted(wins))})" if wins else ""
    rule = (
        "Rule: the measured plan, in flops, at the budget of uniform, is the default, unless the "
        "paper's plan has the lower held-out distance to the polar factor at equal flops in two "
        "architectures or more."
    )
    found = f"it has the lower one in {len(wins)} of {len(compared)}{named}"
    return [rule, f"Found: {found}. The default is {winner}."]


def worse_than_uniform(scores: Runs) -> list[str]:
    """How often each plan has a greater held-out residual than uniform in the same run."""
    counts: dict[str, list[bool]] = defaultdict(list)
    for plans in scores.values():
        for plan, by_seed in plans.items():
            for seed, found in by_seed.items():
                base = plans.get(UNIFORM, {}).get(seed)
                if plan != UNIFORM and base is not None:
                    counts[plan].append(found["residual"] > base["residual"])
    return [
        f"- {plan}: greater held-out residual than uniform in {sum(some)} of {len(some)} runs"
        for plan, some in counts.items()
    ]


def loss_curves(runs: Runs) -> list[str]:
    """The validation loss of the uniform runs on the way, mean over seeds."""
    lines = []
    for architecture in ordered(runs, ARCHITECTURES):
        records = [*runs[architecture].get(BASELINE, {}).values()]
        if records:
            steps = records[0]["validation_loss"]
            losses = [[record["validation_loss"][step] for step in steps] for record in records]
            told = ", ".join(f"{statistics.fmean(some):.3f}" for some in zip(*losses, strict=True))
            lines.append(f"- {architecture}: {told} at steps {', '.join(steps)}")
    return lines


def text(folder: Path) -> str:
    """All of it as Markdown.

    Raises:
        ValueError: There are no results.
    """
    runs, scores = read_runs(folder), read_scores(folder)
    if not runs and not scores:
        raise ValueError(f"output: found no results in {folder}, expected those of `train`")
    parts = [
        ("Validation loss", loss_table(runs)),
        ("Validation loss of Muon-PE uniform on the way", loss_curves(runs)),
        ("Held-out momentum", score_table(scores)),
        ("Plans that are worse than uniform", worse_than_uniform(scores)),
        ("The default", verdict(scores)),
    ]
    return "\n\n".join(f"### {title}\n\n" + "\n".join(lines) for title, lines in parts if lines)


Panels = dict[str, dict[str, list[float]]]
"""Values of all seeds by architecture and by variant or plan."""


def loss_panels(runs: Runs) -> Panels:
    """Differences of the final validation loss against the uniform schedule."""
    panels: Panels = {}
    for architecture, by_variant in runs.items():
        losses = {v: {s: final_loss(r) for s, r in some.items()} for v, some in by_variant.items()}
        panels[architecture] = {
            VARIANTS[variant].title: differences(losses[variant], losses.get(BASELINE, {}))
            for variant in VARIANTS
            # AdamW is far off, and would flatten the rest.
            if variant in losses and variant not in (BASELINE, "adamw")
        }
    return panels


def score_panels(scores: Runs, metric: str) -> Panels:
    """Held-out ``residual`` or ``distance``."""
    return {
        architecture: {plan: [f[metric] for f in found.values()] for plan, found in plans.items()}
        for architecture, plans in scores.items()
    }


def plot(folder: Path) -> list[Path]:
    """Draw the differences of validation loss, and the scores; the files written."""
    scores = read_scores(folder)
    pictures = {"validation_loss": loss_panels(read_runs(folder))}
    pictures |= {f"held_out_{metric}": score_panels(scores, metric) for metric in METRICS}
    return [
        _draw(folder / f"{name}.png", name.replace("_", " "), panels)
        for name, panels in pictures.items()
        if any(any(panel.values()) for panel in panels.values())
    ]


def _draw(path: Path, title: str, panels: Panels) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = ordered(panels, ARCHITECTURES)
    figure, axes = pyplot.subplots(1, len(names), figsize=(5 * len(names), 3.6), squeeze=False)
    for panel, name in zip(axes[0], names, strict=True):
        _draw_panel(panel, name, panels[name])
    against = " against Muon-PE uniform" if path.stem == "validation_loss" else ""
    figure.supxlabel(title + against)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _draw_panel(axes: Any, title: str, values_by_name: Mapping[str, Sequence[float]]) -> None:
    """Means with intervals, one row for each name, and the seeds as dots."""
    for row, values in enumerate(values_by_name.values()):
        if values:
            mean, half = interval(values)
            axes.errorbar(mean, row, xerr=half if math.isfinite(half) else 0, fmt="o", capsize=3)
            axes.scatter(values, [row] * len(values), s=8, color="grey", zorder=3)
    axes.set_yticks(range(len(values_by_name)), [*values_by_name])
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.set_title(title)
