"""Results of evaluations: the paper's averages and t-tests come out, mistakes are named."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks.amo_paper import compare
from benchmarks.amo_paper.results import PAPER_TASKS, Result, read_results, score_table

GOLDEN = Path(__file__).parent / "golden"
MAIN = GOLDEN / "paper_main_results.json"


def record(model: str, optimizer: str, **tasks: float) -> dict[str, Any]:
    return {"model": model, "optimizer": optimizer, "tasks": tasks}


def test_tasks_and_averages_are_those_of_the_paper() -> None:
    main = json.loads(MAIN.read_text())
    assert [task.name for task in PAPER_TASKS] == list(main[0]["tasks"])
    other = json.loads((GOLDEN / "paper_other_results.json").read_text())
    off = [
        (row["model"], row["optimizer"])
        for rows in ({"main": main} | other).values()
        for row in rows
        # Half a unit of the last printed digit.
        if abs(statistics.fmean(row["tasks"].values()) - row["average"]) > 0.005 + 1e-9
    ]
    # One printed average, 40.38, is not the mean of its row, 40.48.
    assert off == [("Qwen3-1.7B", "Floor 1e-2 Q")]
    assert score_table(read_results([MAIN])).count("**") == 2 * 4


def test_the_t_tests_of_the_paper_come_out() -> None:
    pytest.importorskip("scipy")
    printed = json.loads((GOLDEN / "paper_t_test.json").read_text())
    for one, row in zip(compare.compare(read_results([MAIN]), "AMO"), printed, strict=True):
        found = (one.improvement, one.t, one.p, one.p_holm)
        # Half a unit of the last printed digit of each column.
        widths = {"improvement": 0.0051, "t": 0.00051, "p": 5.1e-5, "p_holm": 5.1e-5}
        expected = [pytest.approx(row[name], abs=width) for name, width in widths.items()]
        assert (one.baseline, one.num_models, *found) == (row["baseline"], 4, *expected)


def test_holm_is_its_definition() -> None:
    """The greatest of ``(m - rank) p`` over all p-values up to each one."""
    for values in itertools.permutations([0.01, 0.02, 0.022, 0.5]):
        ranked = list(enumerate(sorted(values)))
        expected = [min(1.0, max((4 - i) * p for i, p in ranked if p <= own)) for own in values]
        assert compare.holm(values) == expected


def test_there_is_no_t_without_variance() -> None:
    results = [
        Result(f"m{i}", name, {"a": score + 20 * i})
        for i in range(2)
        for name, score in (("AMO", 50.0), ("B", 49.0))
    ]
    (found,) = compare.compare(results, "AMO")
    assert all(map(math.isnan, (found.t, found.p, found.p_holm)))


@pytest.mark.parametrize(
    ("records", "field"),
    [
        ([], "results"),
        ([{"optimizer": "A", "tasks": {"a": 1}}], "model"),
        ([record("m", "A")], "tasks"),
        ([record("m", "A", a=101.0)], "tasks.a"),
        ([record("m", "A", a=float("nan"))], "tasks.a"),
        ([record("m", "A", a=1), record("m", "A", a=1)], "m with A"),
        ([record("m", "A", a=1), record("m", "B", a=1, b=2)], "tasks"),
    ],
)
def test_malformed_results_are_named(tmp_path: Path, records: list[Any], field: str) -> None:
    (tmp_path / "r.json").write_text(json.dumps(records))
    with pytest.raises(ValueError, match=field):
        read_results([tmp_path / "r.json"])
