"""``compare``: tables of scores, and whether one optimizer beats the others.

The test is the AMO paper's: for each baseline a paired t-test over models on their unweighted
averages, one-sided (is the candidate better?), with Holm's correction over the baselines.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.amo_paper.results import Result, read_results, score_table
from benchmarks.tables import markdown

SIGNIFICANT = 0.05
"""Corrected p-values below this are marked."""


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """The candidate against one baseline.

    Attributes:
        baseline: The optimizer it is compared with.
        num_models: Models that both were evaluated on; the degrees of freedom are one fewer.
        improvement: Mean over the models of the difference of averages, in percentage points.
        t: The t statistic; NaN with fewer than two models, or where all differences are equal.
        p: One-sided p-value, uncorrected; NaN where there is no ``t``.
        p_holm: The p-value after Holm's correction over all comparisons.
    """

    baseline: str
    num_models: int
    improvement: float
    t: float = math.nan
    p: float = math.nan
    p_holm: float = math.nan


def compare(results: Sequence[Result], candidate: str) -> list[Comparison]:
    """Compare one optimizer with all others over the models that both were evaluated on.

    Args:
        results: Results of :func:`benchmarks.amo_paper.results.read_results`.
        candidate: The optimizer that is asked to be better.

    Returns:
        One comparison for each baseline. Holm's correction counts all of them, those without a
        p-value included.

    Raises:
        ValueError: The candidate is unknown, or an optimizer has no model in common with it.
    """
    averages: dict[str, dict[str, float]] = {}
    for result in results:
        averages.setdefault(result.optimizer, {})[result.model] = result.average
    if candidate not in averages:
        known = ", ".join(averages)
        raise ValueError(f"--candidate: found {candidate!r}, expected one of those read: {known}")
    names = [name for name in averages if name != candidate]
    plain = [_compare_one(name, averages[candidate], averages[name]) for name in names]
    pairs = zip(plain, holm([one.p for one in plain]), strict=True)
    return [dataclasses.replace(one, p_holm=p_holm) for one, p_holm in pairs]


def _compare_one(name: str, candidate: dict[str, float], baseline: dict[str, float]) -> Comparison:
    """The comparison without a correction."""
    models = [model for model in candidate if model in baseline]
    if not models:
        raise ValueError(f"{name}: found no model in common with the candidate, expected some")
    pairs = [(candidate[model], baseline[model]) for model in models]
    differences = [ours - theirs for ours, theirs in pairs]
    improvement = statistics.fmean(differences)
    # Equal differences have no variance, and averages carry rounding errors of some 1e-14.
    if len(models) < 2 or max(differences) - min(differences) < 1e-9:
        return Comparison(name, len(models), improvement)
    from scipy import stats

    test = stats.ttest_rel(*zip(*pairs, strict=True), alternative="greater")
    return Comparison(name, len(models), improvement, float(test.statistic), float(test.pvalue))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction.

    Args:
        p_values: P-values in any order. NaN stays NaN and counts among the tests.

    Returns:
        The corrected p-values in the same order, each at most 1.

    Source: S. Holm, "A simple sequentially rejective multiple test procedure" (1979).
    """
    corrected = [math.nan] * len(p_values)
    known = [(p, index) for index, p in enumerate(p_values) if not math.isnan(p)]
    running = 0.0
    for rank, (p, index) in enumerate(sorted(known)):
        running = max(running, min(1.0, (len(p_values) - rank) * p))
        corrected[index] = running
    return corrected


def comparison_table(candidate: str, comparisons: Sequence[Comparison]) -> str:
    """The comparisons as a Markdown table; ``*`` marks corrected p-values below 0.05."""
    rows = [
        [
            f"{candidate} vs {one.baseline}",
            one.num_models,
            f"{one.improvement:+.2f}",
            f"{one.t:+.3f}",
            f"{one.p:.4f}",
            f"{one.p_holm:.4f}",
            "*" if one.p_holm < SIGNIFICANT else "",
        ]
        for one in comparisons
    ]
    header = ["comparison", "models", "improvement", "t", "p", "p (Holm)", ""]
    return markdown(header, rows)


def add_commands(subparsers: Any) -> None:
    """Register ``compare``."""
    parser = subparsers.add_parser(
        "compare",
        help="tables of scores and paired t-tests",
        description="Print the scores of evaluated models by task with their unweighted average, "
        "and test one-sidedly, paired over models and with Holm's correction, whether one "
        "optimizer beats the others.",
        epilog="example: python -m benchmarks.amo_paper compare results/*.json",
    )
    parser.add_argument("results", nargs="+", help="results files, as `score` writes them")
    parser.add_argument(
        "--candidate", default="AMO", help="the optimizer to test (default %(default)s)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print tables for parsed arguments.

    Raises:
        ValueError: See :func:`compare` and ``read_results``.
    """
    results = read_results(args.results)
    print(score_table(results))
    comparisons = compare(results, args.candidate)
    if comparisons:
        print(f"\n{comparison_table(args.candidate, comparisons)}")
    return 0
