from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest

from amo_dist.config import AMOConfig
from amo_dist.schedule.amo import AMOPolicy
from amo_dist.schedule.grouping import group_matrices, layer_index
from amo_dist.schedule.types import MatrixInfo
from tests import spectra
from tests.held import Held

TYPES = ("attn_q", "mlp_up", "router")
REGISTRY = [MatrixInfo(f"layers.{i}.x.{t}", (8, 4 + i), t) for i in range(12) for t in TYPES]
FIELDS: dict[str, Any] = {
    "observe_until": 4,
    "observe_every": 2,
    "transition_steps": 3,
    "sample_size": 2,
}
PAPER = AMOConfig.paper(**FIELDS)
MEASURED = AMOConfig(**FIELDS)
both = pytest.mark.parametrize(
    "config", [pytest.param(PAPER, id="projected"), pytest.param(MEASURED, id="measured")]
)


def ell_of(name: str) -> float:
    """Unlike for every matrix; deeper is harder."""
    index, operator_type = layer_index(name) or 0, name.rsplit(".", 1)[1]
    return 0.3 ** (index / 2 + TYPES.index(operator_type) + 1)


def run_to(step: int, config: AMOConfig = MEASURED, **fields: Any) -> Held:
    policy = Held(AMOPolicy(dataclasses.replace(config, **fields)))
    policy.bind(REGISTRY)
    for now in range(1, step + 1):
        policy.schedules(now)
        if names := policy.sample(now):
            spectra.record(policy, now, {name: ell_of(name) for name in names})
        if policy.plan_due():
            policy.adopt_plan(policy.make_plan())
    return policy


def names_of_groups(registry: Sequence[MatrixInfo], granularity: str) -> dict[str, str]:
    return dict(group_matrices(registry, granularity).group_of)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("layers.3.attention.wq.weight", 3),
        ("layers.12.experts.7.w1.weight", 12),
        ("model.layers.3.mlp.experts[7]", 3),
        # Whatever else has a number: a wrapper, a part of a list of models.
        ("0.layers.5.attention.wq.weight", 5),
        ("1.transformer.h.2.attn.c_attn.weight", 2),
        ("encoder_blocks.4.mlp.0.weight", 4),
        ("0.attention.wq.weight", None),
        ("model.w1.weight", None),
        ("output.weight", None),
    ],
)
def test_layer_index(name: str, expected: int | None) -> None:
    assert layer_index(name) == expected


@pytest.mark.parametrize(
    ("num_layers", "sizes"), [(1, [1, 0, 0]), (2, [1, 1, 0]), (3, [1, 1, 1]), (28, [10, 9, 9])]
)
def test_thirds_of_the_depth(num_layers: int, sizes: list[int]) -> None:
    registry = [MatrixInfo(f"layers.{i}.q", (2, 2), "attn_q") for i in range(num_layers)]
    found = names_of_groups([*registry, MatrixInfo("outside.w", (2, 2), "attn_q")], "layer_group")
    assert found.pop("outside.w") == "attn_q"
    depths = [found[f"layers.{i}.q"].partition("/")[2] for i in range(num_layers)]
    assert [depths.count(depth) for depth in ("shallow", "middle", "deep")] == sizes
    assert depths == sorted(depths, key=["shallow", "middle", "deep"].index)


@both
@pytest.mark.parametrize(("granularity", "num_groups"), [("operator_type", 3), ("layer_group", 9)])
def test_a_finer_plan_is_a_plan_over_groups(
    granularity: str, num_groups: int, config: AMOConfig
) -> None:
    policy = run_to(10, config, granularity=granularity)
    plan = policy.plan
    assert plan is not None
    assert len(plan.operator_types) == num_groups
    assert sum(plan.allocation) == 5 * num_groups or config is MEASURED
    schedules = policy.schedules(10)
    assert set(schedules) == {policy.group_of(matrix.name) for matrix in REGISTRY}
    assert policy.phase(10) == "locked"
    # Deeper layers were made harder: only a finer grouping can tell.
    steps = [schedules[policy.group_of(f"layers.{i}.x.mlp_up")].num_steps for i in (0, 11)]
    assert (steps[0] < steps[1]) == (granularity != "operator_type")


@both
@pytest.mark.parametrize("granularity", ["layer_group", "shape"])
def test_granularity_is_a_change_of_grouping_and_nothing_else(
    granularity: str, config: AMOConfig
) -> None:
    """Types that are named like the groups give the same plan, at the default granularity."""
    fine = run_to(8, config, granularity=granularity)
    relabelled = Held(AMOPolicy(config))
    names = names_of_groups(REGISTRY, granularity)
    relabelled.bind([MatrixInfo(m.name, m.shape, names[m.name]) for m in REGISTRY])
    for step in (2, 4):
        sampled = run_to(step - 1, config, granularity=granularity).sample(step)
        assert relabelled.sample(step) == sampled
        spectra.record(relabelled, step, {name: ell_of(name) for name in sampled})
    relabelled.adopt_plan(relabelled.make_plan())
    assert relabelled.plan == fine.plan
    assert all(relabelled.schedules(step) == fine.schedules(step) for step in range(1, 9))


def test_a_shape_is_a_group_whatever_the_type_and_the_way_it_lies() -> None:
    registry = [
        MatrixInfo("layers.0.wq", (8, 16), "attn_q"),
        MatrixInfo("layers.0.wo", (16, 8), "attn_o"),
        MatrixInfo("layers.0.w1", (8, 8), "mlp_up"),
    ]
    members = group_matrices(registry, "shape").members
    found = {group: [m.name for m in some] for group, some in members.items()}
    assert found == {"8x16": ["layers.0.wo", "layers.0.wq"], "8x8": ["layers.0.w1"]}


# --- observation alone


@both
def test_observe_only_records_and_stays_uniform(config: AMOConfig) -> None:
    policy = run_to(12, config, observe_only=True)
    assert len(policy.observations) == 2
    assert policy.plan is None
    assert [policy.phase(step) for step in (1, 4, 5, 12)] == [
        *("observation", "observation", "uniform", "uniform"),
    ]
    assert policy.schedules(12) == policy.schedules(1)
    assert policy.next_change(5) == policy.next_change(12) == math.inf
    assert policy.sample(6) == ()
    assert not policy.plan_due()
    metrics = policy.metrics(12)
    assert metrics["amo/phase"] == 3.0
    assert metrics["amo/observations"] == 2.0
    assert metrics["amo/ell/router"] < metrics["amo/ell/attn_q"]


@both
def test_observe_only_records_what_planning_would_have_used(config: AMOConfig) -> None:
    observed, planned = run_to(4, config, observe_only=True), run_to(4, config)
    assert observed.observations == planned.observations
    assert planned.plan is not None
    with pytest.raises(ValueError, match="observe_only never commits"):
        observed.adopt_plan(planned.plan.to_json())


@both
def test_an_infeasible_budget_is_told_at_the_first_step(config: AMOConfig) -> None:
    config = dataclasses.replace(config, budget_ratio=0.1)
    with pytest.raises(ValueError, match=r"budget: found \d+, expected at least"):
        Held(AMOPolicy(config)).bind(REGISTRY)
