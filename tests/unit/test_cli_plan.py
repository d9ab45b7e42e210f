"""``amo plan``: from targets as the paper plans, and again from a run's plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from amo_dist.__main__ import main
from amo_dist.config import AMOConfig
from amo_dist.schedule.plan import Plan
from tests.sources import plan_of

TWO = ["plan", "--ell", "attn_k=1e-2", "--ell", "attn_q=3e-4"]


def planned(capsys: pytest.CaptureFixture[str], *argv: str) -> Plan:
    assert main([*argv, "--json"]) == 0
    return Plan.from_json(capsys.readouterr().out)


def test_a_runs_plan_is_shown_and_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, file = plan_of(AMOConfig()), tmp_path / "plan.json"
    file.write_text(plan.to_json() + "\n")
    for path in (tmp_path, file):
        assert planned(capsys, "plan", "--plan", str(path)) == plan
    assert main(["plan", "--plan", str(file)]) == 0
    assert capsys.readouterr().out == f"{plan}\n"
    assert main(TWO) == 0
    assert "attn_q" in capsys.readouterr().out
    for ratio in (0.8, 1.0, 1.2):  # three allocations
        again = planned(capsys, "plan", "--plan", str(file), f"--budget-ratio={ratio}")
        assert again.allocation == plan_of(AMOConfig(budget_ratio=ratio)).allocation
    paper = planned(capsys, *TWO)
    assert paper.operator_types == ("attn_q", "attn_k")  # in our order
    file.write_text(paper.to_json())
    again = planned(capsys, "plan", "--plan", str(file), "--budget-ratio=0.9")
    assert again.allocation == planned(capsys, *TWO, "--budget-ratio=0.9").allocation


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (["--ell", "q"], "--ell"),
        (["--ell", "q=0"], "ell"),
        (["--ell", "q=nan"], "ell"),
        ([*TWO[1:], "--budget-ratio", "0.1"], "budget"),
        (["--ell", "q=1e-3", "--min-steps", "8"], "max_steps"),
        (["--plan", "none"], "none"),
        (["--plan", "PLAN", "--max-steps=8"], "--plan"),
    ],
)
def test_a_mistake_names_the_option(
    options: list[str], field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.json").write_text(plan_of(AMOConfig()).to_json())
    assert main(["plan", *(str(tmp_path) if word == "PLAN" else word for word in options)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert field in printed.err
