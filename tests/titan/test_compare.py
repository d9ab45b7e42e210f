from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks.amo_paper import compare
from benchmarks.amo_paper.results import PAPER_TASKS, Result, read_results, score_table

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
MAIN = GOLDEN / "paper_main_results.json"

needs_scipy = pytest.mark.skipif(
    importlib.util.find_spec("scipy") is None, reason="needs SciPy (extra `stats`)"
)


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    compare.add_command(parser.add_subparsers())
    return parser.parse_args(["compare", *arguments])


def write(path: Path, *records: dict[str, Any]) -> str:
    path.write_text(json.dumps(list(records)))
    return str(path)


def record(model: str, optimizer: str, **tasks: float) -> dict[str, Any]:
    return {"model": model, "optimizer": optimizer, "tasks": tasks}


def printed_tables() -> dict[str, list[dict[str, Any]]]:
    other = json.loads((GOLDEN / "paper_other_results.json").read_text())
    return {"main": json.loads(MAIN.read_text()), **other}


def test_averages_of_the_paper_are_unweighted_means() -> None:
    off = [
        (row["model"], row["optimizer"])
        for rows in printed_tables().values()
        for row in rows
        # Half a unit of the last printed digit.
        if abs(statistics.fmean(row["tasks"].values()) - row["average"]) > 0.005 + 1e-9
    ]
    # One printed average, 40.38, is not the mean of its row, 40.48.
    assert off == [("Qwen3-1.7B", "Floor 1e-2 Q")]


def test_tasks_are_those_of_the_paper() -> None:
    (first, *_) = json.loads(MAIN.read_text())
    assert [task.name for task in PAPER_TASKS] == list(first["tasks"])
    assert [task.name for task in PAPER_TASKS if task.num_fewshot] == ["mmlu_pro"]


@needs_scipy
def test_the_t_tests_of_the_paper_come_out() -> None:
    printed = json.loads((GOLDEN / "paper_t_test.json").read_text())
    found = compare.compare(read_results([MAIN]), "AMO")
    assert [one.baseline for one in found] == [row["baseline"] for row in printed]
    for one, row in zip(found, printed, strict=True):
        assert one.num_models == 4
        assert one.t is not None
        assert one.p is not None
        assert one.p_holm is not None
        # Half a unit of the last printed digit of each column.
        assert one.improvement == pytest.approx(row["improvement"], abs=0.0051)
        assert one.t == pytest.approx(row["t"], abs=0.00051)
        assert one.p == pytest.approx(row["p"], abs=0.000051)
        assert one.p_holm == pytest.approx(row["p_holm"], abs=0.000051)
        assert (one.p_holm < compare.SIGNIFICANT) == row["significant"]


def slow_holm(p_values: list[float]) -> list[float]:
    """By definition: the greatest of ``(m - rank) p`` over all p-values up to each one."""
    order = sorted(p_values)
    m = len(order)
    return [min(1.0, max((m - i) * p for i, p in enumerate(order) if p <= own)) for own in p_values]


@pytest.mark.parametrize("p_values", list(itertools.permutations([0.01, 0.02, 0.022, 0.5])))
def test_holm_is_its_definition(p_values: tuple[float, ...]) -> None:
    # The same products in the same order: equal to the last bit.
    assert compare.holm(p_values) == slow_holm(list(p_values))


@pytest.mark.parametrize("scores", [[(50.0, 49.0)], [(50.0, 49.0), (30.1, 29.1)]])
def test_no_t_without_variance(scores: list[tuple[float, float]]) -> None:
    results = [
        Result(f"m{i}", name, {"a": score})
        for i, pair in enumerate(scores)
        for name, score in zip(("AMO", "B"), pair, strict=True)
    ]
    (found,) = compare.compare(results, "AMO")
    assert (found.t, found.p, found.p_holm) == (None, None, None)
    assert found.improvement == pytest.approx(1.0, abs=1e-9)  # rounding of the differences
    assert "n/a" in compare.comparison_table("AMO", [found])


@needs_scipy
def test_pairs_are_models_in_common(tmp_path: Path) -> None:
    rows = [record(f"m{i}", "AMO", a=50.0 + i * i) for i in range(4)]
    rows += [record(f"m{i}", "B", a=49.0) for i in (3, 0, 2)]  # another order, one missing
    found = compare.compare(read_results([write(tmp_path / "r.json", *rows)]), "AMO")[0]
    assert found.num_models == 3
    assert found.improvement == pytest.approx((10 + 1 + 5) / 3, abs=1e-12)  # one rounding


def test_the_table_has_all_rows_and_the_best_average() -> None:
    table = score_table(read_results([MAIN]))
    assert table.count("**") == 2 * 4
    assert "**39.69**" in table
    lines = table.splitlines()
    assert len([line for line in lines if line.startswith("| Muon-KJ")]) == 4
    assert lines[2].split()[1:5] == ["optimizer", "|", "AE", "|"]


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "found none"),
        ([3], "expected an object"),
        ([{"optimizer": "A", "tasks": {"a": 1}}], r"\[0\]\.model: found None"),
        ([record("m", "A")], "expected scores by task"),
        ([record("m", "A", a=101.0)], r"tasks\.a: found 101\.0, expected 0 to 100"),
        ([record("m", "A", a=True)], "found True"),
        ([record("m", "A", a=float("nan"))], "found nan"),
        ([record("m", "A", a=1), record("m", "A", a=1)], "m with A twice"),
        ([record("m", "A", a=1), record("m", "B", a=1, b=2)], "differ .*: b; expected the same"),
    ],
)
def test_malformed_results_are_named(tmp_path: Path, records: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_results([write(tmp_path / "r.json", *records)])
