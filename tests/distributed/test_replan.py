"""Planning again, and the guard of residuals, in several layouts."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from amo_dist import AMO, AMOConfig, param_groups
from tests.distributed import models
from tests.distributed.harness import Ranks
from tests.oracle import Oracle

LR, WEIGHT_DECAY, SEED = 3e-3, 0.1, 7
REPLAN: dict[str, Any] = {
    "observe_until": 4,
    "observe_every": 2,
    "sample_size": 2,
    "transition_steps": 4,
    "replan_every": 6,
    "bucket_bytes": 256,
}
"""Plans at steps 4, 10 and 16, the last of which locks at step 20."""
OBJECTIVES = [
    pytest.param({}, id="measured"),
    pytest.param({"objective": "projected", "budget_unit": "steps"}, id="projected"),
]
LAYOUTS = [
    pytest.param("plain", 1, id="one-process"),
    pytest.param("plain", 2, id="ddp-2"),
    pytest.param("fsdp", 3, id="fsdp-3"),
    pytest.param("hsdp", 4, id="hsdp-2x2"),
]


def train(
    rank: int, world_size: int, layout: str, fields: dict[str, Any], num_steps: int
) -> tuple[dict[str, Tensor], list[str], list[dict[str, int]]]:
    """Whole parameters, the control state and the NS steps after each step."""
    model = models.make_model(layout, models.shapes())
    optimizer = AMO(
        param_groups(model),
        lr=LR,
        weight_decay=WEIGHT_DECAY,
        config=AMOConfig(**fields),
        process_group=dist.group.WORLD if layout == "plain" and world_size > 1 else None,
    )
    controls, steps = [], []
    for step in range(1, num_steps + 1):
        models.set_gradients(model, SEED, step)
        optimizer.step()
        controls.append(optimizer.state_dict()["param_groups"][0]["control"])
        schedules = optimizer.policy.schedules(step)
        steps.append({name: schedule.num_steps for name, schedule in schedules.items()})
    params = {name: models.whole(param) for name, param in model.named_parameters()}
    return params, controls, steps


def twin_of(fields: dict[str, Any], num_steps: int) -> tuple[Oracle, list[dict[str, int]]]:
    shapes = models.shapes()
    params = {name: models.initial(name, shape) for name, shape in shapes.items()}
    config = AMOConfig(**fields)
    twin = Oracle(params, models.types(), config, lr=LR, weight_decay=WEIGHT_DECAY)
    steps = []
    for step in range(1, num_steps + 1):
        twin.step({n: models.gradient(SEED, step, n, shape) for n, shape in shapes.items()})
        steps.append({kind: count for kind, (count, _) in twin._state(config).items()})
    return twin, steps


@pytest.mark.parametrize(("layout", "world_size"), LAYOUTS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_planning_again_equals_the_twin_bit_for_bit(
    run_on: Ranks, layout: str, world_size: int, objective: dict[str, Any]
) -> None:
    """Three plans, with the guard at every step, which changes nothing but what it says."""
    fields = {**REPLAN, **objective}
    results = run_on(world_size)(train, layout, {**fields, "ns_guard_every": 1}, 20)
    twin, expected = twin_of(fields, 20)
    for params, controls, steps in results:
        assert all(torch.equal(params[name], twin.params[name]) for name in twin.params)
        assert steps == expected
        assert controls == results[0][1]
    locked = [expected[step - 1] for step in (8, 14, 20)]
    # The gradients were made so that plans differ; else nothing was tested.
    assert len({tuple(each.items()) for each in locked}) > 1


@pytest.mark.parametrize(("layout", "world_size"), LAYOUTS)
def test_all_ranks_fall_back_alike(run_on: Ranks, layout: str, world_size: int) -> None:
    """With a bound that every residual breaks, each type falls back when its turn comes."""
    fields = {
        **REPLAN,
        "replan_every": 0,
        "ns_guard_every": 1,
        "ns_guard_bound": 1e-9,
        "ns_guard_fallback": True,
    }
    registry = sorted(models.types())
    results = run_on(world_size)(train, layout, fields, 14)
    _, planned = twin_of({**REPLAN, "replan_every": 0}, 14)
    for params, controls, steps in results:
        assert controls == results[0][1]
        assert all(torch.equal(params[name], results[0][0][name]) for name in params)
        fallen: set[str] = set()
        for step in range(5, 15):
            expected = {k: 5 if k in fallen else count for k, count in planned[step - 1].items()}
            assert steps[step - 1] == expected, step
            # A matrix of one row is orthogonal to the last bit, in one layout as in another.
            kind = models.types()[registry[(step - 1) % len(registry)]]
            fallen |= {kind} if f'"{kind}":{step}' in controls[step - 1] else set()
        assert len(fallen) >= 5


def log_on_one_rank(rank: int, world_size: int) -> list[str]:
    """Types fall back at steps of plans, each of which is like the one before."""
    model = models.make_model("fsdp", models.shapes())
    fields = {"observe_every": 1, "observe_until": 2, "transition_steps": 1, "replan_every": 1}
    guard = {"ns_guard_every": 1, "ns_guard_bound": 1e-9, "ns_guard_fallback": True}
    config = AMOConfig(**{**REPLAN, **fields, **guard})
    optimizer = AMO(param_groups(model), config=config)
    fallen = []

    def constant(matrix: Tensor, coefficients: Tensor, norm_scale: float) -> Tensor:
        return torch.full((1 + 2 * len(coefficients),), 0.01, dtype=torch.float64)

    with mock.patch("amo_dist.engine.observer.observe", constant):
        for step in range(1, 9):
            models.set_gradients(model, SEED, step)
            optimizer.step()
            if rank == 0:
                optimizer.metrics()
            start = optimizer.control_state_dict()["policy"]["transition_from"] or {}
            uniform = [config.base_steps, config.base_ell.hex()]
            fallen.append(" ".join(kind for kind, found in start.items() if found == uniform))
    return fallen


def test_what_one_rank_logs_is_no_difference_between_ranks(run_on: Ranks) -> None:
    found = run_on(2)(log_on_one_rank)
    assert found[0] == found[1]
    # Else no type fell back at a plan's step, and the logger asked for nothing new.
    assert any(found[0])
