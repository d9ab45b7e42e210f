"""Tables of the runs; a `pandas.DataFrame` has a row for each record."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from benchmarks.plan_quality.jobs import CONTENDERS, RATE_SEED
from benchmarks.plan_quality.model import ARCHITECTURES
from benchmarks.plan_quality.rows import ROWS
from benchmarks.tables import markdown, plus_minus

BAR = "uniform-5"
RATE, STEPS, SWITCH = 8e-3, 250, 100
"""Rate, steps and switch of the main table."""
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


def read(folder: Path) -> pd.DataFrame:
    """All records of a folder.

    Raises:
        ValueError: There are none.
    """
    paths = sorted((folder / "runs").glob("*.json"))
    if not paths:
        raise ValueError(f"output: found no results in {folder}, expected those of `run`")
    return pd.DataFrame([json.loads(path.read_text()) for path in paths])


def read_with_gaps(folder: Path) -> pd.DataFrame:
    """All records, with the loss less that of five uniform steps from the same start."""
    runs = read(folder)
    start = ["architecture", "seed", "norm", "rate", "steps", "order"]
    bars = runs[runs["row"] == BAR].set_index(start)["validation_loss"].rename("bar")
    runs = runs.join(bars, on=start)
    runs["gap"] = runs["validation_loss"] - runs["bar"]
    return runs


def of_main_table(runs: pd.DataFrame, norm: str) -> pd.DataFrame:
    """Records of the rows at one ``update_norm``, but for what another table varies."""
    same = (runs["rate"] == RATE) & (runs["steps"] == STEPS) & (runs["switch"] == SWITCH)
    own = runs["row"].isin(ROWS) & (runs["order"] == 0) & (runs["seed"] != RATE_SEED)
    return runs[same & own & (runs["norm"] == norm)]


def by_row(runs: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Title and records of each row that has records."""
    for name, row in ROWS.items():
        group = runs[runs["row"] == name]
        if len(group):
            yield row.title, group


def by_model(values: pd.Series, models: pd.Series) -> list[str]:
    """Mean and interval of differences in each model."""
    return [plus_minus(values[models == name], "+") for name in ARCHITECTURES]


def noise_lines(runs: pd.DataFrame) -> str:
    """How far the same run differs by rounding."""
    same = of_main_table(runs, "exact")
    first = (same["architecture"] == next(iter(ARCHITECTURES))) & (same["seed"] == 0)
    plain = same[first & (same["row"] == BAR)]["validation_loss"]
    after = runs[runs["row"].str.startswith(f"{BAR}~")]["validation_loss"]
    whole = runs[runs["order"] > 0]["validation_loss"]
    lines = []
    for text, others in (("the switch", after), ("the first step", whole)):
        losses = [*plain, *others]
        spread = statistics.stdev(losses)
        shown = ", ".join(f"{loss:.4f}" for loss in losses)
        lines.append(
            f"- another order of sums from {text} on: {shown}; standard deviation {spread:.2g}"
        )
    seeds = same["seed"].nunique()
    lines.append(
        f"- so a mean of {seeds} runs is no higher than another within the noise where it is "
        f"above by no more than {1.96 * spread * math.sqrt(2 / seeds):.4f}"
    )
    return "\n".join(lines)


def main_table(runs: pd.DataFrame) -> str:
    """Flops of each row, and in each model the loss and its difference from the bar, paired."""
    columns = [f"{name}: loss, against uniform 5" for name in ARCHITECTURES]
    rows = []
    for title, group in by_row(runs):
        means = group.groupby("architecture")["validation_loss"].mean()
        gaps = by_model(group["gap"], group["architecture"])
        cells = [f"{means[name]:.4f}, {gap}" for name, gap in zip(ARCHITECTURES, gaps, strict=True)]
        whole = [f"{means.mean():.4f}", plus_minus(group["gap"], "+"), group["seed"].nunique()]
        rows.append([title, f"{group['flops_after'].mean():.3f}", *cells, *whole])
    header = ["after the switch", "flops", *columns, "mean of models", "all pairs", "seeds"]
    return markdown(header, rows)


def twin_table(runs: pd.DataFrame) -> str:
    """Rows of the same flops against each other, paired by seed and model."""
    losses = runs.pivot(index=["architecture", "seed"], columns="row", values="validation_loss")
    rows = []
    for first, second in TWINS:
        gaps = (losses[first] - losses[second]).dropna()
        cells = by_model(gaps, gaps.index.get_level_values("architecture"))
        titles = [ROWS[first].title, ROWS[second].title]
        rows.append([*titles, *cells, plus_minus(gaps, "+"), len(gaps)])
    return markdown(["row", "against", *ARCHITECTURES, "all models", "pairs"], rows)


def rate_table(runs: pd.DataFrame) -> str:
    """Losses by rate on the seed apart; the best is bold."""
    tried = runs[(runs["seed"] == RATE_SEED) & runs["row"].isin(CONTENDERS)]
    index = ["architecture", "norm", "row"]
    losses = tried.pivot(index=index, columns="rate", values="validation_loss")
    losses = losses.reindex(
        pd.MultiIndex.from_product([ARCHITECTURES, ("exact", "as_is"), CONTENDERS])
    ).dropna(how="all")
    rows = []
    for (name, norm, row), own in losses.iterrows():
        texts = own.map("{:.4f}".format, na_action="ignore").fillna("")
        texts[own.idxmin()] = f"**{texts[own.idxmin()]}**"
        rows.append([name, norm, ROWS[row].title, *texts])
    rates = [f"{rate:g}" for rate in losses.columns]
    return markdown(["model", "norm", "after the switch", *rates], rows)


def switch_table(runs: pd.DataFrame) -> str:
    """Differences of three uniform steps from five by the step of the switch."""
    own = (runs["row"] == "uniform-3") & (runs["norm"] == "exact") & (runs["rate"] == RATE)
    runs = runs[own & (runs["steps"] == STEPS) & (runs["seed"] != RATE_SEED)]
    columns = []
    for _, group in runs.groupby("switch"):
        counts = group["architecture"].value_counts()
        gaps = by_model(group["gap"], group["architecture"])
        columns.append(
            [f"{gap} ({counts[name]})" for name, gap in zip(ARCHITECTURES, gaps, strict=True)]
        )
    header = ["model", *(f"switch at step {step}" for step in sorted(runs["switch"].unique()))]
    return markdown(header, list(zip(ARCHITECTURES, *columns, strict=True)))


def long_table(runs: pd.DataFrame) -> str:
    """The rows of the long runs."""
    rows = []
    for name, own in runs[runs["steps"] != STEPS].groupby("architecture"):
        for title, group in by_row(own):
            flops, loss, gap = group[["flops_after", "validation_loss", "gap"]].mean()
            rows.append([name, title, f"{flops:.3f}", f"{loss:.4f}", f"{gap:+.4f}"])
    return markdown(["model", "after the switch", "flops", "loss", "against uniform 5"], rows)


def plan_table(runs: pd.DataFrame) -> str:
    """Steps of the plans by type, in the order of the model."""
    rows = []
    for title, group in by_row(runs[runs["plan"].map(len) == 7]):
        plans = group["plan"].map(lambda plan: " ".join(str(steps) for steps, _ in plan.values()))
        cells = []
        for name in ARCHITECTURES:
            counts = Counter(plans[group["architecture"] == name])
            cells.append(", ".join(f"{plan} ({num})" for plan, num in counts.most_common(2)))
        rows.append([title, *cells])
    return markdown(["after the switch", *ARCHITECTURES], rows)


def text(folder: Path) -> str:
    """All tables as Markdown.

    Raises:
        ValueError: There are no results.
    """
    runs = read_with_gaps(folder)
    exact = of_main_table(runs, "exact")
    parts = {
        "Noise": noise_lines(runs),
        "Exact norm": main_table(exact),
        "Norm as it is": main_table(of_main_table(runs, "as_is")),
        "At the same flops": twin_table(exact),
        "Rates": rate_table(runs),
        "When to switch": switch_table(runs),
        "Long runs": long_table(runs),
        "Steps by type": plan_table(exact),
    }
    return "\n\n".join(f"### {name}\n\n{part}" for name, part in parts.items())


def dtype_text(folder: Path) -> str:
    """Loss with iterates of each dtype less that of float32, as Markdown."""
    runs = read(folder)
    losses = runs.pivot(
        index=["architecture", "seed"], columns="ns_dtype", values="validation_loss"
    )
    gaps = losses.sub(losses["float32"], axis=0)
    models = gaps.index.get_level_values("architecture")
    rows = [
        [dtype, *by_model(gap, models), plus_minus(gap, "+"), len(gap)]
        for dtype, gap in gaps.items()
    ]
    return markdown(["ns_dtype", *ARCHITECTURES, "all pairs", "pairs"], rows)
