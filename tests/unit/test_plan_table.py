"""A plan beside the uniform schedule, and what it takes from its types."""

from __future__ import annotations

import logging
import math

import pytest

from amo_dist.config import AMOConfig
from amo_dist.schedule.amo import AMOPolicy
from amo_dist.schedule.plan import Plan, starved
from amo_dist.schedule.types import MatrixInfo
from tests import spectra
from tests.held import Held
from tests.unit.test_measured_plan import ALIKE, HARD_AND_EASY, TIMES, plan_of


def test_the_table_stands_beside_uniform() -> None:
    plan = plan_of(AMOConfig(), HARD_AND_EASY, ALIKE)
    head, *rows, total, objective, budget = str(plan).splitlines()
    for words in ("ell target", "steps before", "distance before", "NS Gflop/step"):
        assert words in head
    assert [row.split()[0] for row in rows] == list(HARD_AND_EASY)
    assert plan.measured is not None
    for row, one, error, steps in zip(
        rows, plan.measured, plan.errors, plan.allocation, strict=True
    ):
        _, _, *cells, _ = row.split()
        expected = [f"{math.sqrt(value):.4f}" for value in (one.uniform_distance, error)]
        assert cells == ["5", str(steps), *expected]
    assert total.split()[:3] == ["total", "10", str(sum(plan.allocation))]
    change = plan.objective / plan.uniform_objective - 1
    assert objective == (
        f"squared error of the update {plan.objective:.5f} (uniform: "
        f"{plan.uniform_objective:.5f}, {change:+.1%}) at {plan.flops_ratio:.1%} of its flops"
    )
    assert budget == "budget 100 flops, 3 to 7 steps per type, planner measured"


STARVING = {"attn_v": 2e-4, "mlp_up": 5e-4, "mlp_down": 5e-4}
"""So hard, as the shrunken bound has it, that steps are better spent on the others."""


def test_a_projected_plan_that_starves_warns_and_names_the_type(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = [MatrixInfo(f"layers.0.{kind}", (4, 4), kind) for kind in STARVING]
    lines = {}
    for name, config in (
        ("projected", AMOConfig.paper(**TIMES, shrinkage=1.0)),
        ("measured", AMOConfig(**TIMES)),
    ):
        policy = Held(AMOPolicy(config), registry)
        for step in (1, 2):
            ells = {m: STARVING[m.rpartition(".")[2]] for m in policy.sample(step)}
            spectra.record(policy, step, ells)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            plan = Plan.from_json(policy.make_plan())
        lines[name] = starved(plan)
        told = [record.getMessage() for record in caplog.records]
        assert told == lines[name]
    assert lines["measured"] == []
    (line,) = lines["projected"]
    assert line.startswith("the plan starves attn_v: 3 Newton-Schulz steps, where the easier mlp_")
    assert "; residual " in line
