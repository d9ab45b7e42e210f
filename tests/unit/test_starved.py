"""What a plan takes from operator types, in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from amo_dist.config import AMOConfig
from amo_dist.schedule.plan import Plan, starved
from amo_dist.schedule.planning import plan_allocation

GOLDEN = Path(__file__).parents[1] / "golden"
TABLE: dict[str, dict[str, Any]] = json.loads((GOLDEN / "locked_schedules.json").read_text())


def papers_plan(model: str, ratio: float = 1.0) -> Plan:
    ells = {name: row["ell_target"] for name, row in TABLE[model].items()}
    return plan_allocation(AMOConfig.paper(budget_ratio=ratio), ells)


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ("Qwen3-1.7B", "the plan raises the projected error of mlp_gate from 0.1287 to 0.3282"),
        (
            "Llama-3.1-760M",
            (
                "the plan raises the projected error of attn_k from 0.1287 to 0.2044, mlp_down "
                "from 0.1287 to 0.1508"
            ),
        ),
    ],
)
def test_the_papers_plans_starve_no_type_but_take_from_easy_ones(model: str, line: str) -> None:
    assert starved(papers_plan(model)) == [line]


@pytest.mark.parametrize("model", TABLE)
def test_a_plan_with_room_takes_nothing(model: str) -> None:
    assert starved(papers_plan(model, 1.2)) == []


def test_a_starved_type_is_named_with_the_easier_one_of_most_steps() -> None:
    assert starved(papers_plan("Qwen3-1.7B", 0.9143)) == [
        (
            "the plan starves attn_o: 3 Newton-Schulz steps, where the easier attn_q gets 6; "
            "projected error 0.9576 (uniform: 0.6993)"
        ),
        "the plan raises the projected error of mlp_gate from 0.1287 to 0.3282",
    ]


def test_the_worst_comes_first() -> None:
    lines = starved(papers_plan("Llama-3.1-760M", 0.7))
    assert [line.partition(":")[0].rpartition(" ")[2] for line in lines[:3]] == [
        "attn_v",  # 0.13 to 0.78
        "attn_o",  # 0.6987 to 0.9575
        "attn_q",  # 0.6988 to 0.9575
    ]
    (rising,) = lines[3:]
    assert rising.index("mlp_up") < rising.index("mlp_gate") < rising.index("attn_k")
