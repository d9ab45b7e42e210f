from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import amo_dist
from amo_dist.config import OPERATOR_TYPES
from amo_dist.schedule.plan import Plan
from amo_dist.tools.cli import main

TABLE: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "golden" / "locked_schedules.json").read_text()
)
TWO = ["plan", "--ell", "attn_k=1e-2", "--ell", "attn_q=3e-4"]


def ell_options(model: str) -> list[str]:
    return [f"--ell={name}={row['ell_target']!r}" for name, row in TABLE[model].items()]


def planned(capsys: pytest.CaptureFixture[str], *options: str) -> Plan:
    assert main(["plan", *options, "--json"]) == 0
    return Plan.from_json(capsys.readouterr().out)


@pytest.mark.parametrize("model", TABLE)
def test_the_papers_rows_come_out(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, *ell_options(model)[::-1])
    assert found.operator_types == OPERATOR_TYPES
    assert (found.criterion, found.planner) == ("projected", "paper")
    # The plan itself: see tests/golden.
    assert found.allocation == tuple(row["steps"] for row in TABLE[model].values())


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(TWO) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        "operator",
        "attn_q",
        "attn_k",
        "total",
        "projected",
        "budget",
    ]
    assert lines[1].split() == ["attn_q", "3.00000e-04", "5", "6", "0.6996", "0.0854"]
    # Of the uniform schedule an easier type has the error at the bound that it is composed for.
    assert lines[2].split() == ["attn_k", "1.00000e-02", "5", "4", "0.1287", "0.0145"]
    assert lines[3].split() == ["total", "10", "10"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["nothing"], "COMMAND: found 'nothing', expected one of plan, doctor; see"),
        (["docter"], "expected one of plan, doctor (did you mean doctor?)"),
        ([*TWO, "--jsn"], "found unknown --jsn, expected options of python -m amo_dist plan (did"),
        (["plan"], "one of the arguments --ell --plan is required"),
        ([*TWO, "--plan", "x"], "--plan: not allowed with argument --ell"),
        (["plan", "--ell", "q"], "--ell: found 'q', expected TYPE=VALUE, e.g. attn_q=3e-4"),
        (["plan", "--ell", "=1e-3"], "--ell: found '=1e-3', expected TYPE=VALUE"),
        (["plan", "--ell", "q=x"], "--ell: found 'q=x', expected TYPE=VALUE"),
        (["plan", "--ell", "q=0"], "--ell: found 'q=0', expected a value in (0, 1]"),
        (["plan", "--ell", "q=nan"], "--ell: found 'q=nan', expected a value in (0, 1]"),
        ([*TWO, "--ell", "attn_q=1e-3"], "--ell: found 'attn_q' twice"),
        ([*TWO, "--budget-ratio", "0"], "budget_ratio: found 0.0, expected a number > 0"),
        ([*TWO, "--budget-ratio", "much"], "--budget-ratio: invalid float value: 'much'"),
        ([*TWO, "--budget-ratio", "0.1"], "budget: found 1, expected at least 2"),
        ([*TWO, "--budget-ratio", "1e9"], "budget: found 10000000000, expected at most 100"),
        ([*TWO, "--min-steps", "8"], "max_steps: found 7, expected an integer >= 8"),
        ([*TWO, "--base-steps", "0"], "base_steps: found 0, expected an integer >= 1"),
    ],
)
def test_mistakes_are_one_line_and_exit_with_two(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert len(found.err.splitlines()) == 1
    assert found.err.startswith("error: ")
    assert message in found.err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"amo-dist {amo_dist.__version__}\n"


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "work of the plan, as a multiple of the uniform schedule's (default 1.0; with" in text
