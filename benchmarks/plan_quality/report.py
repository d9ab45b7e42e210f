"""Tables and figures of the runs, and what the rule says of them."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.plan_quality.jobs import CONTENDERS, RATE_SEED, RATES
from benchmarks.plan_quality.model import ARCHITECTURES
from benchmarks.plan_quality.rows import ROWS, Row

BAR = "uniform-5"
NORMS = ("exact", "as_is")
RATE, STEPS, SWITCH = 8e-3, 250, 100
"""Of the main table."""
TWINS = (
    ("distance-0.8", "uniform-4"),
    ("direction-0.8", "uniform-4"),
    ("residual-0.8", "uniform-4"),
    ("residual-alike-0.8", "uniform-4"),
    ("distance-0.6", "uniform-3"),
    ("distance-0.6-from-1", "uniform-3"),
    ("depth-0.6-from-1", "uniform-3"),
    ("depth-0.6-from-1", "distance-0.6-from-1"),
    ("kj", "uniform-5"),
)
"""Rows of about the same flops, the second the simpler one."""

Record: TypeAlias = dict[str, Any]
Losses: TypeAlias = dict[int, float]
"""Final validation loss by seed."""


class Runs:
    """All records of a folder.

    Raises:
        ValueError: There are none.
    """

    def __init__(self, folder: Path) -> None:
        paths = sorted((folder / "runs").glob("*.json"))
        self.records: list[Record] = [json.loads(path.read_text()) for path in paths]
        if not self.records:
            raise ValueError(f"output: found no results in {folder}, expected those of `run`")

    def pick(self, row: str, **wanted: Any) -> dict[int, Record]:
        """Records of a row by seed, of the main table but for what is asked for."""
        start = {
            "norm": "exact",
            "rate": RATE,
            "steps": STEPS,
            "switch": SWITCH,
            "order": 0,
        }
        wanted = {**start, "row": row, **wanted}
        if row == BAR:
            del wanted["switch"]  # there is none
        return {
            record["seed"]: record
            for record in self.records
            if all(record[field] == value for field, value in wanted.items())
            and (record["seed"] != RATE_SEED or "seed" in wanted)
        }

    def losses(self, row: str, **wanted: Any) -> Losses:
        return {seed: found["validation_loss"] for seed, found in self.pick(row, **wanted).items()}


# ---------------------------------------------------------------- statistics


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half of its 95 % confidence interval by Student's t; NaN for one value."""
    from scipy import stats

    num = len(values)
    if num < 2:
        return statistics.fmean(values), math.nan
    error = statistics.stdev(values) / math.sqrt(num)
    return statistics.fmean(values), float(stats.t.ppf(0.975, num - 1)) * error


def differences(values: Losses, baseline: Losses) -> list[float]:
    """``values - baseline`` for the seeds that both have."""
    return [values[seed] - baseline[seed] for seed in sorted(values.keys() & baseline.keys())]


def plus_minus(values: Sequence[float], sign: str = "") -> str:
    """``mean ± half of the interval``; of fewer than three values the mean alone."""
    if not values:
        return ""
    mean, half = interval(values)
    return f"{mean:{sign}.4f} ± {half:.4f}" if len(values) > 2 else f"{mean:{sign}.4f}"


def noise(runs: Runs) -> tuple[list[float], list[float]]:
    """Losses of one row with other orders of sums: after the switch alone, and all the way."""
    after = [r for r in runs.records if r["row"].startswith(f"{BAR}~")]
    whole = [r for r in runs.records if r["order"]]
    same = runs.losses(BAR, architecture=next(iter(ARCHITECTURES)), seed=0)
    return tuple(  # type: ignore[return-value]
        [*same.values(), *(r["validation_loss"] for r in some)] if some else []
        for some in (after, whole)
    )


def spread(runs: Runs) -> float:
    """Standard deviation of the final loss by rounding from the first step on; NaN if unknown."""
    _, whole = noise(runs)
    return statistics.stdev(whole) if len(whole) > 1 else math.nan


def tolerance(runs: Runs, num: int) -> float:
    """How far the mean of so many runs may lie above another by noise, as the rule has it."""
    return 1.96 * spread(runs) * math.sqrt(2 / num)


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's."""
    from scipy import stats

    return float(stats.spearmanr(first, second).statistic)


# ---------------------------------------------------------------- tables


def head(*columns: str) -> list[str]:
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]


def row_of(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def title(row: str) -> str:
    return ROWS[row].title if row in ROWS else row


def flops_after(runs: Runs, row: str, **wanted: Any) -> float:
    """Mean over seeds and models; NaN where nothing was run."""
    found = [
        record["flops_after"]
        for name in ARCHITECTURES
        for record in runs.pick(row, architecture=name, **wanted).values()
    ]
    return statistics.fmean(found) if found else math.nan


def main_table(runs: Runs, norm: str, **wanted: Any) -> list[str]:
    """By row: flops, and in each model the loss and its difference from the bar, paired."""
    columns = [f"{name}: loss, against uniform 5" for name in ARCHITECTURES]
    lines = head("after the switch", "flops", *columns, "mean of models", "all pairs", "seeds")
    for row in ROWS:
        cells, means, gaps, seeds = [], [], [], []
        for name in ARCHITECTURES:
            losses, bar = (
                runs.losses(each, architecture=name, norm=norm, **wanted) for each in (row, BAR)
            )
            common = {seed: loss for seed, loss in losses.items() if seed in bar}
            gap = differences(common, bar)
            seeds.append(len(common))
            if not common:
                cells.append("")
                continue
            means.append(statistics.fmean(common.values()))
            gaps += gap
            told = "" if row == BAR else f", {plus_minus(gap, '+')}"
            cells.append(f"{statistics.fmean(common.values()):.4f}{told}")
        if not any(seeds):
            continue
        whole = len(means) == len(ARCHITECTURES)
        mean = f"{statistics.fmean(means):.4f}" if whole else ""
        pairs = plus_minus(gaps, "+") if whole and row != BAR else ""
        flops = flops_after(runs, row, norm=norm, **wanted)
        counted = str(seeds[0]) if len(set(seeds)) == 1 else " ".join(map(str, seeds))
        lines.append(row_of(title(row), f"{flops:.3f}", *cells, mean, pairs, counted))
    return lines


def twin_table(runs: Runs) -> list[str]:
    """Rows of the same flops against each other, paired by seed and model."""
    lines = head("row", "against", *ARCHITECTURES, "all models", "pairs")
    for first, second in TWINS:
        by_model = [
            differences(*(runs.losses(row, architecture=name) for row in (first, second)))
            for name in ARCHITECTURES
        ]
        everything = [gap for gaps in by_model for gap in gaps]
        if everything:
            cells = [plus_minus(gaps, "+") for gaps in by_model]
            lines.append(
                row_of(
                    f"{title(first)}",
                    title(second),
                    *cells,
                    plus_minus(everything, "+"),
                    len(everything),
                )
            )
    return lines


def noise_lines(runs: Runs) -> list[str]:
    """How far the same run differs by rounding."""
    lines = []
    for told, losses in zip(
        ("from the switch on", "from the first step on"), noise(runs), strict=True
    ):
        if len(losses) > 1:
            shown = ", ".join(f"{loss:.4f}" for loss in losses)
            lines.append(
                f"- another order of sums {told}: {shown}; standard deviation "
                f"{statistics.stdev(losses):.2g}"
            )
    seeds = max((len(runs.losses(BAR, architecture=name)) for name in ARCHITECTURES), default=0)
    if seeds and math.isfinite(spread(runs)):
        lines.append(
            f"- so a mean of {seeds} runs is no higher than another within the noise where it is "
            f"above by no more than {tolerance(runs, seeds):.4f}"
        )
    return lines


def correlations(runs: Runs, norm: str, where: str) -> dict[str, list[float]]:
    """By functional: its rank correlation with the loss over the rows of one model and seed."""
    groups: dict[tuple[str, int], list[Record]] = defaultdict(list)
    for row in ROWS:
        for name in ARCHITECTURES:
            for seed, record in runs.pick(row, architecture=name, norm=norm).items():
                groups[name, seed].append(record)
    found: dict[str, list[float]] = defaultdict(list)
    for records in groups.values():
        records = [record for record in records if record[where]]
        if len(records) < 6:
            continue
        losses = [record["validation_loss"] for record in records]
        for functional in records[0][where]:
            values = [record[where][functional] for record in records]
            # An update that is smaller is the worse one.
            sign = -1 if functional.startswith("gain") else 1
            found[functional].append(rank_correlation([sign * v for v in values], losses))
        flops = [-record["flops_after"] for record in records]
        found["flops saved"].append(rank_correlation(flops, losses))
    return found


def functional_table(runs: Runs) -> list[str]:
    """Which functional of the spectra orders the losses best."""
    columns = [(norm, where) for norm in NORMS for where in ("scores_at_switch", "scores_after")]
    found = [correlations(runs, *column) for column in columns]
    titles = [
        f"{norm}, spectra {'up to' if where == 'scores_at_switch' else 'after'} the switch"
        for norm, where in columns
    ]
    lines = head("functional", *titles)
    names = [*dict.fromkeys(name for some in found for name in some)]
    names.sort(key=lambda name: -statistics.fmean(found[0].get(name) or [-2.0]))
    for name in names:
        cells = [
            f"{statistics.fmean(some[name]):+.2f} ({len(some[name])})" if name in some else ""
            for some in found
        ]
        lines.append(row_of(name, *cells))
    return lines


def best_rate(runs: Runs, name: str, norm: str, row: str) -> float | None:
    """Of least loss on the seed apart; None until all rates were run."""
    losses = {
        rate: found[RATE_SEED]
        for rate in RATES
        if (found := runs.losses(row, architecture=name, norm=norm, rate=rate, seed=RATE_SEED))
    }
    return min(losses, key=lambda rate: losses[rate]) if len(losses) == len(RATES) else None


def rate_table(runs: Runs) -> list[str]:
    """Losses by rate on the seed apart; the best is bold."""
    lines = head("model", "norm", "after the switch", *(f"{rate:g}" for rate in RATES))
    for name in ARCHITECTURES:
        for norm in NORMS:
            for row in CONTENDERS:
                best = best_rate(runs, name, norm, row)
                cells = []
                for rate in RATES:
                    found = runs.losses(
                        *(row,), architecture=name, norm=norm, rate=rate, seed=RATE_SEED
                    )
                    told = f"{found[RATE_SEED]:.4f}" if found else ""
                    cells.append(f"**{told}**" if rate == best else told)
                if any(cells):
                    lines.append(row_of(name, norm, title(row), *cells))
    return lines


def switch_table(runs: Runs) -> list[str]:
    """Differences from uniform 5 by the step of the switch."""
    switches = sorted({r["switch"] for r in runs.records if r["steps"] == STEPS})
    lines = head("model", "after the switch", *(f"switch at step {s}" for s in switches))
    for name in ARCHITECTURES:
        bar = runs.losses(BAR, architecture=name)
        for row in ROWS:
            gaps = [
                differences(runs.losses(row, architecture=name, switch=switch), bar)
                for switch in switches
            ]
            if row != BAR and sum(map(bool, gaps)) > 1:
                # The same seeds in all columns.
                cells = [f"{plus_minus(gap, '+')} ({len(gap)})" if gap else "" for gap in gaps]
                lines.append(row_of(name, title(row), *cells))
    return lines


def long_table(runs: Runs) -> list[str]:
    """The rows of the long runs."""
    lengths = {(r["steps"], r["switch"]) for r in runs.records if r["steps"] != STEPS}
    lines = head("model", "steps", "after the switch", "flops", "loss", "against uniform 5")
    for steps, switch in sorted(lengths):
        for name in ARCHITECTURES:
            where = {"architecture": name, "steps": steps, "switch": switch}
            bar = runs.losses(BAR, **where)
            for row in ROWS:
                found = runs.pick(row, **where)
                if found:
                    losses = runs.losses(row, **where)
                    flops = statistics.fmean(r["flops_after"] for r in found.values())
                    lines.append(
                        row_of(
                            *(name, steps, title(row), f"{flops:.3f}"),
                            plus_minus([*losses.values()]),
                            "" if row == BAR else plus_minus(differences(losses, bar), "+"),
                        )
                    )
    return lines


def plan_table(runs: Runs) -> list[str]:
    """Steps of the plans by type, in the order of the model."""
    lines = head("after the switch", *ARCHITECTURES)
    for row, each in ROWS.items():
        if not each.measure or each.by_depth:
            continue
        cells = [_allocations(runs.pick(row, architecture=name).values()) for name in ARCHITECTURES]
        if any(cells):
            lines.append(row_of(title(row), *cells))
    return lines


def _allocations(records: Iterable[Record]) -> str:
    counts = Counter(tuple(steps for steps, _ in r["plan"].values()) for r in records)
    return ", ".join(f"{' '.join(map(str, s))} ({num})" for s, num in counts.most_common(2))


# ---------------------------------------------------------------- the rule


def verdict(runs: Runs) -> list[str]:
    """Which rows pass the rule, and which one wins."""
    rates: dict[tuple[str, str], float] = {}
    bars: dict[str, tuple[float, str]] = {}
    for name in ARCHITECTURES:
        for norm in NORMS:
            rates[name, norm] = best_rate(runs, name, norm, BAR) or RATE
        means = [
            (statistics.fmean(losses.values()), norm)
            for norm in NORMS
            if (losses := _at_best(runs, BAR, name, norm))
        ]
        if not means:
            return []
        bars[name] = min(means)
    lines = [
        "The bar: "
        + "; ".join(
            f"{name} {mean:.4f} ({norm}, rate {rates[name, norm]:g})"
            for name, (mean, norm) in bars.items()
        )
    ]
    passed = []
    for norm in NORMS:
        for row in ROWS:
            excess, counts = [], []
            for name in ARCHITECTURES:
                losses = _at_best(runs, row, name, norm)
                bar = _at_best(runs, BAR, name, bars[name][1])
                gap = differences(losses, bar)
                counts.append(len(gap))
                if gap:
                    excess.append(statistics.fmean(gap) - tolerance(runs, len(gap)))
            if len(excess) == len(ARCHITECTURES) and max(excess) <= 0:
                flops = flops_after(runs, row, norm=norm)
                passed.append((round(flops, 2), _complexity(ROWS[row]), title(row), norm, counts))
    for flops, _, told, norm, counts in sorted(passed):
        lines.append(f"- passes: {told}, {norm}: {flops:.2f} of the flops ({counts} seeds)")
    if passed:
        flops, _, told, norm, _ = min(passed)
        lines.append(f"The rule picks: {told}, norm {norm}, {flops:.2f} of the flops.")
    return lines


def _at_best(runs: Runs, row: str, name: str, norm: str) -> Losses:
    """At the row's own best rate, else at that of the bar, else at that of the main table."""
    own = best_rate(runs, name, norm, row) if row in CONTENDERS else None
    for rate in (own, best_rate(runs, name, norm, BAR), RATE):
        if rate and (found := runs.losses(row, architecture=name, norm=norm, rate=rate)):
            return found
    return {}


def _complexity(row: Row) -> int:
    """Uniform steps come before a plan by type, that before one by type and depth."""
    return (1 + row.by_depth + (row.least != 3)) if row.measure else 0


def text(folder: Path) -> str:
    """All of it as Markdown.

    Raises:
        ValueError: There are no results.
    """
    runs = Runs(folder)
    parts: list[tuple[str, list[str]]] = [
        ("The rule's verdict", verdict(runs)),
        ("Noise", noise_lines(runs)),
        ("Exact norm", main_table(runs, "exact")),
        ("Norm as it is", main_table(runs, "as_is")),
        ("At the same flops", twin_table(runs)),
        ("Functionals", functional_table(runs)),
        ("Rates", rate_table(runs)),
        ("When to switch", switch_table(runs)),
        ("Long runs", long_table(runs)),
        ("Steps by type", plan_table(runs)),
    ]
    return "\n\n".join(f"### {name}\n\n" + "\n".join(lines) for name, lines in parts if lines)


def dtype_text(folder: Path) -> str:
    """Loss with iterates of each dtype against float32, as Markdown."""
    losses = {
        (r["architecture"], r["seed"], r["ns_dtype"]): r["validation_loss"]
        for r in Runs(folder).records
    }
    lines = head("ns_dtype", *ARCHITECTURES, "all pairs", "pairs")
    for dtype in dict.fromkeys(dtype for _, _, dtype in losses):
        gaps = [
            [
                loss - losses[name, seed, "float32"]
                for (name, seed, other), loss in losses.items()
                if (name, other) == (model, dtype) and (name, seed, "float32") in losses
            ]
            for model in ARCHITECTURES
        ]
        everything = [gap for model_gaps in gaps for gap in model_gaps]
        cells = [plus_minus(model_gaps, "+") for model_gaps in gaps]
        lines.append(row_of(dtype, *cells, plus_minus(everything, "+"), len(everything)))
    return "\n".join(lines)


# ---------------------------------------------------------------- figures


def plot(folder: Path) -> Path:
    """Draw loss against five uniform steps by flops after the switch, beside the records."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs, path = Runs(folder), folder / "loss_by_work.png"
    series = {
        "same steps for every type": ("uniform-5", "uniform-4", "uniform-3"),
        "plan by operator type": ("distance-0.8", "distance-0.6", "distance-0.5"),
    }
    figure, axes = pyplot.subplots(figsize=(5.2, 3.9))
    for (label, rows), style in zip(series.items(), ("o-", "s--"), strict=True):
        points = []
        for row in rows:
            gaps = [
                gap
                for name in ARCHITECTURES
                for gap in differences(
                    runs.losses(row, architecture=name), runs.losses(BAR, architecture=name)
                )
            ]
            points.append((flops_after(runs, row), *interval(gaps)))
        flops, means, halves = zip(*points, strict=True)
        axes.errorbar(flops, means, halves, fmt=style, capsize=4, markersize=8, label=label)
    axes.axhline(0, color="grey", linewidth=1)
    axes.invert_xaxis()
    axes.set_xlabel("Newton-Schulz flops after 40 % of the run\n(1: five steps for every type)")
    axes.set_ylabel("final loss against five steps")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=200)
    pyplot.close(figure)
    return path
