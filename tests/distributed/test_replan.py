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
CASES = [
    pytest.param("plain", 2, {"planner": "paper"}, id="ddp-2-projected"),
    pytest.param("fsdp", 3, {}, id="fsdp-3-measured"),
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
        schedules = optimizer.schedules_by_group(step)
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


@pytest.mark.parametrize(("layout", "world_size", "planner"), CASES)
def test_planning_again_equals_the_twin_bit_for_bit(
    run_on: Ranks, layout: str, world_size: int, planner: dict[str, Any]
) -> None:
    """Three plans, with the guard at every step, which changes nothing but what it says."""
    fields = {**REPLAN, **planner}
    results = run_on(world_size)(train, layout, {**fields, "ns_guard_every": 1}, 20)
    twin, expected = twin_of(fields, 20)
    for params, controls, steps in results:
        assert all(torch.equal(params[name], twin.params[name]) for name in twin.params)
        assert steps == expected
        assert controls == results[0][1]
    locked = [expected[step - 1] for step in (8, 14, 20)]
    # The gradients were made so that plans differ; else nothing was tested.
    assert len({tuple(each.items()) for each in locked}) > 1


def log_on_one_rank(rank: int, world_size: int) -> list[str]:
    """Each plan is like the one before; a logger on one rank asks for schedules, too."""
    model = models.make_model("fsdp", models.shapes())
    fields = {"observe_every": 1, "observe_until": 2, "transition_steps": 1, "replan_every": 1}
    optimizer = AMO(param_groups(model), config=AMOConfig(**{**REPLAN, **fields}))
    controls = []

    def constant(matrix: Tensor, coefficients: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.full((1 + 2 * len(coefficients),), 0.01, dtype=torch.float64)

    with mock.patch("amo_dist.engine.controller.observe", constant):
        for step in range(1, 9):
            models.set_gradients(model, SEED, step)
            optimizer.step()
            if rank == 0:
                optimizer.metrics()
                optimizer.schedules_by_group(max(step - 1, 1))
            controls.append(optimizer.state_dict()["param_groups"][0]["control"])
    return controls


def test_what_one_rank_logs_is_no_difference_between_ranks(run_on: Ranks) -> None:
    found = run_on(2)(log_on_one_rank)
    assert found[0] == found[1]
