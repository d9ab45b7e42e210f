"""Every layout against the single-process twin: the same bits, the same schedules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from amo_dist import AMO, AMOConfig, param_groups
from tests.distributed import models
from tests.distributed.harness import Ranks
from tests.oracle import Oracle

LR, WEIGHT_DECAY, STEPS, SEED = 3e-3, 0.1, 9, 7
PAPER: dict[str, Any] = {"planner": "paper"}
AMO_FIELDS: dict[str, Any] = {
    "observe_until": 4,
    "observe_every": 2,
    "sample_size": 2,
    "transition_steps": 3,
    # Small buckets: the tiny matrices of these tests fill several.
    "bucket_bytes": 256,
}


def train(
    rank: int,
    world_size: int,
    layout: str,
    shapes: dict[str, tuple[int, ...]],
    fields: dict[str, Any],
) -> tuple[dict[str, Tensor], dict[str, Any], list[dict[str, int]]]:
    """Parameters, control state and NS steps of each step, after a run through all phases."""
    model = models.make_model(layout, shapes)
    group = dist.group.WORLD if layout == "plain" and world_size > 1 else None
    optimizer = AMO(
        param_groups(model),
        lr=LR,
        weight_decay=WEIGHT_DECAY,
        config=AMOConfig(**fields),
        process_group=group,
    )
    steps: list[dict[str, int]] = []
    for step in range(1, STEPS + 1):
        models.set_gradients(model, SEED, step)
        optimizer.step()
        schedules = optimizer.schedules_by_group(step)
        steps.append({name: schedule.num_steps for name, schedule in schedules.items()})
    params = {name: models.whole(param) for name, param in model.named_parameters()}
    return params, optimizer.control_state_dict(), steps


def oracle(shapes: dict[str, tuple[int, ...]], fields: dict[str, Any]) -> Oracle:
    params = {name: models.initial(name, shape) for name, shape in shapes.items()}
    twin = Oracle(params, models.types(), AMOConfig(**fields), lr=LR, weight_decay=WEIGHT_DECAY)
    for step in range(1, STEPS + 1):
        twin.step({n: models.gradient(SEED, step, n, shape) for n, shape in shapes.items()})
    return twin


def check_against_twin(
    results: list[Any], shapes: dict[str, tuple[int, ...]], fields: dict[str, Any]
) -> None:
    twin = oracle(shapes, fields)
    for params, control, steps in results:
        for name, expected in twin.params.items():
            assert torch.equal(params[name], expected), name
        plan = control["policy"]["plan"]
        assert plan["allocation"] == [twin.allocation[kind] for kind in twin.order]
        assert plan["ell_target"] == [twin.targets[kind].hex() for kind in twin.order]
        assert steps[-1] == twin.allocation
        assert control == results[0][1]
    # The gradients were made so that the plan is not the uniform one; else nothing was tested.
    assert len(set(twin.allocation.values())) > 1


CASES = [
    pytest.param("plain", 1, "float32", {}, id="one-process"),
    pytest.param("plain", 3, "bfloat16", PAPER, id="ddp-3"),
    pytest.param("fsdp", 2, "bfloat16", {}, id="fsdp-2"),
    pytest.param("fsdp", 3, "float32", PAPER, id="fsdp-3"),
    pytest.param("fsdp", 4, "bfloat16", {}, id="fsdp-4"),
    pytest.param("hsdp", 4, "bfloat16", PAPER, id="hsdp-2x2"),
    pytest.param("tp", 2, "float32", {}, id="tp-2"),
    pytest.param("tp", 3, "bfloat16", PAPER, id="tp-3"),
    pytest.param("tp_fsdp", 4, "bfloat16", {}, id="tp-2-fsdp-2"),
]


@pytest.mark.parametrize(("layout", "world_size", "ns_dtype", "planner"), CASES)
def test_every_layout_equals_the_twin_bit_for_bit(
    run_on: Ranks, layout: str, world_size: int, ns_dtype: str, planner: dict[str, Any]
) -> None:
    # FSDP over TP needs dims that TP divides: torch pads nothing there.
    even = layout == "tp_fsdp"
    shapes = models.shapes(models.EVEN_SHAPES if even else models.SHAPES)
    fields = {**AMO_FIELDS, **planner, "ns_dtype": ns_dtype}
    results = run_on(world_size)(train, layout, shapes, fields)
    check_against_twin(results, shapes, fields)
