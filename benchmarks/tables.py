"""Tables as text."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def markdown(header: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table with aligned columns; the first column is text, the others numbers."""
    texts = [[str(cell) for cell in row] for row in (header, *rows)]
    # The rule of a Markdown table has at least three characters.
    first, *others = (max(3, *map(len, column)) for column in zip(*texts, strict=True))
    head, *lines = ([row[0].ljust(first), *map(str.rjust, row[1:], others)] for row in texts)
    rule = ["-" * first, *("-" * (width - 1) + ":" for width in others)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *lines))


def plus_minus(values: Sequence[float], sign: str = "") -> str:
    """``mean ± half of its 95 % interval``; of fewer than three values the mean alone."""
    if len(values) == 0:
        return ""
    mean = f"{statistics.fmean(values):{sign}.4f}"
    if len(values) < 3:
        return mean
    from scipy import stats

    error = statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean} ± {stats.t.ppf(0.975, len(values) - 1) * error:.4f}"  # Student's t
