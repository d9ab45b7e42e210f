"""Tables as text."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def markdown(header: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table with aligned columns; the first column is text, the others numbers."""
    head, *lines = pad([header, *rows], left=(0,), least=3)
    rule = ["-" * len(head[0]), *("-" * (len(cell) - 1) + ":" for cell in head[1:])]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *lines))


def pad(
    rows: Sequence[Sequence[object]], left: Sequence[int] = (), least: int = 0
) -> list[list[str]]:
    """Pad the cells of a table to the width of their column.

    Args:
        rows: Rows of equally many cells, header included.
        left: Columns to align to the left; the others are aligned to the right.
        least: Fewest characters of a column.
    """
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(least, *map(len, column)) for column in zip(*texts, strict=True)]
    return [
        [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in texts
    ]


def plus_minus(values: Sequence[float], sign: str = "") -> str:
    """``mean ± half of its 95 % interval``; of fewer than three values the mean alone."""
    if len(values) == 0:
        return ""
    mean = f"{statistics.fmean(values):{sign}.4f}"
    return f"{mean} ± {half_interval(values):.4f}" if len(values) > 2 else mean


def half_interval(values: Sequence[float]) -> float:
    """Half of the 95 % confidence interval of a mean by Student's t; 0 for equal values."""
    from scipy import stats

    error = statistics.stdev(values) / math.sqrt(len(values))
    return float(stats.t.ppf(0.975, len(values) - 1)) * error
