"""The AMO paper's table of locked schedules, row by row: coefficients and allocations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from amo_dist.config import OPERATOR_TYPES, AMOConfig
from amo_dist.schedule.allocate import least_error
from amo_dist.schedule.plan import plan_paper
from amo_dist.schedule.polar_express import SAFETY, compose, error_curve

TABLE: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("locked_schedules.json").read_text()
)
ROWS = [(model, name) for model, rows in TABLE.items() for name in rows]


def test_the_table_is_whole() -> None:
    assert all(tuple(rows) == OPERATOR_TYPES for rows in TABLE.values())
    assert len(ROWS) == 14


@pytest.mark.parametrize(("model", "operator_type"), ROWS)
def test_row_is_reproduced_to_the_printed_precision(model: str, operator_type: str) -> None:
    row = TABLE[model][operator_type]
    composed = compose(SAFETY * row["ell_target"], row["steps"])
    # The paper prints five significant digits.
    assert [[float(f"{x:.5g}") for x in triple] for triple in composed] == row["coefficients"]


def curves(model: str) -> list[dict[int, float]]:
    return [error_curve(SAFETY * row["ell_target"], range(3, 8)) for row in TABLE[model].values()]


@pytest.mark.parametrize("model", TABLE)
def test_rows_need_the_safety_factor_on_ell(model: str) -> None:
    row = TABLE[model]["attn_q"]
    composed = compose(row["ell_target"], row["steps"])
    assert [[float(f"{x:.5g}") for x in triple] for triple in composed] != row["coefficients"]


@pytest.mark.parametrize("model", TABLE)
def test_allocation_is_reproduced(model: str) -> None:
    targets = {name: row["ell_target"] for name, row in TABLE[model].items()}
    plan = plan_paper(AMOConfig.paper(), targets)
    assert plan.budget == 35
    assert plan.allocation == tuple(row["steps"] for row in TABLE[model].values())
    assert plan.allocation == least_error(curves(model), 35, (1,) * 7)


@pytest.mark.parametrize(
    ("model", "budget_ratio", "greedy", "exact", "costs"),
    [
        ("Llama-3.1-760M", 0.914, (6, 4, 4, 6, 4, 4, 4), (3, 4, 5, 6, 5, 5, 4), (1.5171, 1.47798)),
        ("Qwen3-1.7B", 0.6857, (3, 3, 5, 3, 3, 3, 4), (3, 3, 3, 3, 4, 4, 4), (4.60122, 4.48203)),
    ],
)
def test_greedy_is_not_optimal_on_the_papers_own_curves(
    model: str, budget_ratio: float, greedy: Any, exact: Any, costs: tuple[float, float]
) -> None:
    """Budgets of 32 and 24 steps: curves of hard types are not convex."""
    targets = {name: row["ell_target"] for name, row in TABLE[model].items()}
    plan = plan_paper(AMOConfig.paper(budget_ratio=budget_ratio), targets)
    least = least_error(curves(model), plan.budget, (1,) * 7)
    assert plan.allocation == greedy
    assert least == exact
    cost = sum(curve[k] for curve, k in zip(curves(model), least, strict=True))
    # The costs are known to five decimals.
    assert (plan.objective, cost) == pytest.approx(costs, abs=5e-6)
