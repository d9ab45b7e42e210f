"""``amo plan`` of a run's plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from amo_dist.config import AMOConfig
from amo_dist.schedule.budget import ns_step_flops
from amo_dist.schedule.plan import Plan
from amo_dist.schedule.planning import plan_allocation, plan_measured
from amo_dist.schedule.trials import Trials
from amo_dist.tools.cli import main

# Hard, middling and easy; the hard type is dear, so that a plan has something to weigh.
SPECTRA = {
    "attn_q": [10.0 ** (-0.7 - 0.11 * j) for j in range(40)],
    "attn_k": [10.0 ** (-0.7 - 0.03 * j) for j in range(40)],
    "mlp_up": [10.0 ** (-0.7 - 0.015 * j) for j in range(40)],
}
COSTS = {name: 4 * ns_step_flops(64, n) for name, n in zip(SPECTRA, (64, 128, 256), strict=True)}
NUM_MATRICES = dict.fromkeys(SPECTRA, 4)
WEIGHTS = (0.25, 0.25, 0.5)
ELLS = {"attn_q": 3e-4, "attn_k": 1e-3, "mlp_up": 2e-3}


def errors(trials: Trials, spectrum: list[float]) -> list[float]:
    """As an observation keeps them: from the definitions."""
    images = [[one.image(x / one.norm_scale) for x in spectrum] for one in trials.schedules()]
    count = len(spectrum)
    residuals = [sum((y * y - 1) ** 2 for y in ys) / count for ys in images]
    distances = [sum((y - 1) ** 2 for y in ys) / count for ys in images]
    return residuals + distances


def measured_plan(steps: range = range(3, 8), **changes: Any) -> Plan:
    """A plan as a run with the default settings makes it."""
    trials = Trials(steps, 5, 1e-3)
    return plan_measured(
        AMOConfig(min_steps=steps[0], max_steps=steps[-1], **changes),
        {name: trials.best(errors(trials, spectrum)) for name, spectrum in SPECTRA.items()},
        num_matrices=tuple(NUM_MATRICES.values()),
        weights=WEIGHTS,
        ell_robust=tuple(ELLS.values()),
        costs=COSTS,
    )


def projected_plan(**changes: Any) -> Plan:
    """A plan as a run with the paper's settings makes it."""
    trials = Trials(range(3, 8), 5, 1e-3)
    return plan_allocation(
        AMOConfig.paper(**changes),
        ELLS,
        costs=COSTS,
        num_matrices=tuple(NUM_MATRICES.values()),
        measured=tuple(trials.at(errors(trials, SPECTRA[name]), ELLS[name]) for name in SPECTRA),
    )


def unmeasured_plan() -> Plan:
    """A projected plan without observations, as of ``amo plan --ell``."""
    return plan_allocation(AMOConfig.paper(), ELLS, costs=COSTS)


def write(folder: Path, plan: Plan) -> str:
    (folder / "plan.json").write_text(plan.to_json() + "\n")
    return str(folder)


def output(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["plan", *argv]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("plan", [measured_plan(), projected_plan(), unmeasured_plan()])
def test_a_run_s_plan_is_shown_as_it_is(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path, plan)
    for path in (folder, f"{folder}/plan.json"):
        assert output(capsys, "--plan", path).startswith(str(plan) + "\n")
    assert Plan.from_json(output(capsys, "--plan", folder, "--json")) == plan


@pytest.mark.parametrize(
    ("plan", "option"),
    [
        (measured_plan(budget_ratio=0.87), "--max-steps=7"),
        (measured_plan(budget_ratio=1.13), "--min-steps=3"),
        (projected_plan(budget_ratio=0.9), "--max-steps=7"),
        (unmeasured_plan(), "--budget-ratio=1.0"),
    ],
)
def test_planning_again_as_the_run_did_gives_its_plan(
    plan: Plan, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path, plan)
    assert output(capsys, "--plan", folder, option, "--json") == output(
        capsys, "--plan", folder, "--json"
    )


@pytest.mark.parametrize("ratio", [0.8, 1.0, 1.2])
def test_another_budget_gives_the_plan_that_the_run_would_have_made(
    ratio: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    option, expected = f"--budget-ratio={ratio}", measured_plan(budget_ratio=ratio)
    folder = write(tmp_path, measured_plan())
    assert output(capsys, "--plan", folder, option) == str(expected) + "\n"
    folder, paper = write(tmp_path, projected_plan()), projected_plan(budget_ratio=ratio)
    assert output(capsys, "--plan", folder, option).startswith(str(paper) + "\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budget-ratio=0.3"], "found measurements of 3 to 7 steps, expected 1 to 7, which"),
        (["--max-steps=8"], "found measurements of 3 to 7 steps, expected 3 to 8, which"),
        (["--budget-ratio=0.1"], "budget: found"),
        (["--base-steps=4"], "--base-steps: found 4, expected none with --plan: the uniform"),
    ],
)
def test_mistakes_are_one_line(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--plan", write(tmp_path, measured_plan()), *options]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert len(found.err.splitlines()) == 1
    assert found.err.startswith("error: ")
    assert message in found.err
