"""The ladder on ranks: it equals the twin, and goes on from each rung in any world."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from amo_dist import AMO, AMOConfig, RankMismatchError, param_groups
from tests.distributed import models
from tests.distributed.harness import Died, Ranks
from tests.oracle import Oracle

SEED, STEPS, WEIGHT_DECAY = 3, 24, 0.1
FIELDS: dict[str, Any] = {
    "observe_until": 4,
    "observe_every": 2,
    "sample_size": 2,
    "transition_steps": 2,
    "bucket_bytes": 256,
    "ladder_tau": 1.0,
}
NAMES = ("attention.wq.weight", "attention.wo.weight", "feed_forward.w2.weight")
SHAPES: dict[str, tuple[int, ...]] = {
    **{f"layers.{i}.{name}": models.EVEN_SHAPES[name] for i in range(2) for name in NAMES},
    "norm.weight": (8,),
}
LOCK = 6


def rate_of(step: int) -> float:
    """Up, a peak in the middle of the observation, down past rungs, zero, and up again."""
    falling = [0.9, 0.8, 0.6, 0.5, 0.4, 0.4, 0.3, 0.25, 0.2, 0.1, 0.05, 0.0]
    return 1e-2 * [0.5, 1.0, 0.9, 0.9, 0.9, 0.9, *falling, 0.3, 0.5, 0.8, 1.0, 1.2, 1.2][step - 1]


def make(fields: dict[str, Any]) -> tuple[nn.Module, AMO]:
    layout = "plain" if dist.get_world_size() == 1 else "fsdp"
    model = models.make_model(layout, SHAPES)
    return model, AMO(param_groups(model), weight_decay=WEIGHT_DECAY, config=AMOConfig(**fields))


def take(model: nn.Module, optimizer: AMO, last: int) -> list[dict[str, int]]:
    """Steps up to the last; the Newton-Schulz steps of each."""
    counts = []
    for step in range(optimizer.num_steps_taken + 1, last + 1):
        models.set_gradients(model, SEED, step)
        for group in optimizer.param_groups:
            group["lr"] = rate_of(step)
        optimizer.step()
        schedules = optimizer.schedules_by_group(step)
        counts.append({name: schedule.num_steps for name, schedule in schedules.items()})
    return counts


def state_of(model: nn.Module, optimizer: AMO) -> dict[str, Any]:
    optimizer_state = get_optimizer_state_dict(model, optimizer)
    return {"model": get_model_state_dict(model), "optimizer": optimizer_state}


def result(model: nn.Module, optimizer: AMO) -> tuple[dict[str, Tensor], str]:
    params = {name: models.whole(param) for name, param in model.named_parameters()}
    return params, optimizer.state_dict()["param_groups"][0]["control"]


def train(
    rank: int, world_size: int, fields: dict[str, Any]
) -> tuple[dict[str, Tensor], str, list[dict[str, int]]]:
    model, optimizer = make(fields)
    counts = take(model, optimizer, STEPS)
    return *result(model, optimizer), counts


def save_and_die(rank: int, world_size: int, fields: dict[str, Any], folder: str, at: int) -> None:
    """Train up to a step, save, and lose a rank in the next step."""
    model, optimizer = make(fields)
    take(model, optimizer, at)
    dcp.save(state_of(model, optimizer), checkpoint_id=str(Path(folder, f"step-{at}")))
    if rank == world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)


def resume(
    rank: int, world_size: int, fields: dict[str, Any], folder: str, at: int
) -> tuple[dict[str, Tensor], str, list[dict[str, int]]]:
    model, optimizer = make(fields)
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=str(Path(folder, f"step-{at}")))
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    counts = take(model, optimizer, STEPS)
    return *result(model, optimizer), counts


def twin() -> tuple[dict[str, Tensor], list[dict[str, int]]]:
    params = {name: models.initial(name, shape) for name, shape in SHAPES.items()}
    types = {name: models.TYPES[name.split(".", 2)[2]] for name in SHAPES if "layers" in name}
    oracle = Oracle(params, types, AMOConfig(**FIELDS), lr=0.0, weight_decay=WEIGHT_DECAY)
    counts = []
    for step in range(1, STEPS + 1):
        oracle.lr = rate_of(step)
        assert oracle.adamw is not None
        oracle.adamw.param_groups[0]["lr"] = rate_of(step)
        oracle.step({n: models.gradient(SEED, step, n, shape) for n, shape in SHAPES.items()})
        state = oracle._state(AMOConfig(**FIELDS))
        counts.append({kind: count for kind, (count, _) in state.items()})
    return oracle.params, counts


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("ownership", ["round_robin", "balanced"])
def test_a_run_with_a_ladder_equals_the_twin_bit_for_bit(
    run_on: Ranks, world_size: int, ownership: str
) -> None:
    """Steps fall with the rate and rise again, by one step of one type at a time."""
    results = run_on(world_size)(train, {**FIELDS, "ownership": ownership})
    params, counts = twin()
    for found, control, steps in results:
        assert steps == counts
        assert control == results[0][1]
        assert all(torch.equal(found[name], params[name]) for name in params)
    totals = [sum(each.values()) for each in counts]
    assert all(abs(a - b) <= 1 for a, b in zip(totals[LOCK - 1 :], totals[LOCK:], strict=False))
    lowest = totals.index(min(totals))
    assert totals[lowest] <= totals[LOCK - 1] - 5
    assert totals[-1] > totals[lowest]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "at", "other"),
    [(2, 7, 4), (4, 9, 1), (1, 11, 2), (2, 13, 1), (4, 15, 2), (1, 18, 4), (2, 20, 4)],
)
def test_a_run_killed_in_a_rung_goes_on_in_another_world(
    run_on: Ranks, tmp_path: Path, world_size: int, at: int, other: int
) -> None:
    params, counts = twin()
    died = run_on(world_size, fresh=True)(save_and_die, FIELDS, str(tmp_path), at)
    assert died[-1] == Died(-signal.SIGKILL)
    for found, _, steps in run_on(other)(resume, FIELDS, str(tmp_path), at):
        assert steps == counts[at:]
        assert all(torch.equal(found[name], params[name]) for name in params)


def unlike_rates(rank: int, world_size: int, taken: int) -> str:
    model, optimizer = make(FIELDS)
    take(model, optimizer, taken)
    models.set_gradients(model, SEED, taken + 1)
    for group in optimizer.param_groups:
        group["lr"] = 0.5 * (1 + rank)
    try:
        optimizer.step()
    except RankMismatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("taken", [2, 8])
def test_ranks_with_unlike_rates_are_told_before_the_step(run_on: Ranks, taken: int) -> None:
    for message in run_on(2)(unlike_rates, taken):
        assert "rank 0 has greatest learning rate of matrices 0.5; rank 1 has " in message
