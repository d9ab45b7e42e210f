"""Checkpoints through torch.distributed.checkpoint, to the same world and to others."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from amo_dist import AMO, AMOConfig, Muon, param_groups
from amo_dist.distributed.layout import local_tensor
from tests import runs
from tests.distributed import models
from tests.distributed.harness import Ranks
from tests.distributed.test_ranks import raised
from torchtitan_ext import CheckpointReader

FIELDS = runs.PHASES | {"bucket_bytes": 256}
CONFIGS = {"measured": AMOConfig(**FIELDS), "paper": AMOConfig.paper(**FIELDS)}
STEPS, SEED = 9, 3
# Before an observation, between two, at the plan, in the transition, at the lock, after it.
SAVED = (1, 3, 4, 5, 7, 8)
SHAPES = models.shapes(models.EVEN_SHAPES)  # FSDP over TP needs even dims
WQ = "layers.0.attention.wq.weight"


def make(layout: str, planner: str = "measured") -> tuple[nn.Module, AMO]:
    model = models.make_model(layout, SHAPES)
    group = dist.group.WORLD if layout == "plain" and dist.get_world_size() > 1 else None
    config = CONFIGS[planner]
    return model, AMO(param_groups(model), lr=1e-2, config=config, process_group=group)


def state_of(model: nn.Module, optimizer: Muon, flatten: bool = False) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }


def go_on(
    model: nn.Module, optimizer: AMO, folder: str = "", flatten: bool = False
) -> dict[str, Any]:
    """Train to the end, saving on the way where a folder is given."""
    schedules, controls = {}, {}
    for step in range(optimizer.num_steps_taken + 1, STEPS + 1):
        models.set_gradients(model, SEED, step)
        optimizer.step()
        schedules[step] = dict(optimizer.schedules_by_type(step))
        controls[step] = copy.deepcopy(optimizer.control_state_dict())
        if folder and step in SAVED:
            path = str(Path(folder, f"step-{step}"))
            dcp.save(state_of(model, optimizer, flatten), checkpoint_id=path)
    momentum = optimizer.state[model.get_parameter(WQ)]["momentum_buffer"]
    return {
        "params": runs.weights(model) | {"momentum": models.whole(momentum)},
        "schedules": schedules,
        "controls": controls,
    }


def train_and_save(
    rank: int,
    world_size: int,
    layout: str,
    folder: str,
    flatten: bool,
    planner: str = "measured",
) -> tuple[dict[str, Any], list[str]]:
    model, optimizer = make(layout, planner)
    keys = sorted(
        f"{name}.{key}"
        for name, values in get_optimizer_state_dict(model, optimizer)["state"].items()
        for key in values
    )
    assert optimizer.num_steps_taken == 0  # the helper took no step to make state
    return go_on(model, optimizer, folder, flatten), keys


def resume(
    rank: int,
    world_size: int,
    layout: str,
    folder: str,
    flatten: bool,
    steps: tuple[int, ...],
    planner: str = "measured",
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    results = []
    for step in steps:
        model, optimizer = make(layout, planner)
        state = state_of(model, optimizer, flatten)
        dcp.load(state, storage_reader=CheckpointReader(Path(folder, f"step-{step}")))
        set_model_state_dict(model, state["model"])
        options = StateDictOptions(flatten_optimizer_state_dict=flatten)
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
        restored = copy.deepcopy(optimizer.control_state_dict())
        results.append((restored, go_on(model, optimizer)))
    return results


def check(reference: dict[str, Any], results: list[Any], steps: tuple[int, ...]) -> None:
    for of_rank in results:
        for step, (restored, found) in zip(steps, of_rank, strict=True):
            assert restored == reference["controls"][step]
            for later in range(step + 1, STEPS + 1):
                assert found["schedules"][later] == reference["schedules"][later]
                assert found["controls"][later] == reference["controls"][later]
            # Gradients are injected, and nothing else reduces over ranks: the same bits even where
            # the world is another.
            assert runs.equal(found["params"], reference["params"]), step


@pytest.mark.parametrize(("flatten", "planner"), [(False, "measured"), (True, "paper")])
def test_fsdp_resumes_bit_for_bit(
    run_on: Ranks, tmp_path: Path, flatten: bool, planner: str
) -> None:
    saved = run_on(2)(train_and_save, "fsdp", str(tmp_path), flatten, planner)
    reference, keys = saved[0]
    assert all(keys == keys_of_rank for _, keys_of_rank in saved)
    before, after = (reference["controls"][step]["source"] for step in (3, 4))
    assert "attn_q" in before["errors"]
    assert not after["errors"]
    assert after["plan"]["planner"] == planner
    check(reference, run_on(2)(resume, "fsdp", str(tmp_path), flatten, SAVED, planner), SAVED)


@pytest.mark.slow
def test_a_checkpoint_moves_between_worlds(run_on: Ranks, tmp_path: Path) -> None:
    reference, _ = run_on(2)(train_and_save, "fsdp", str(tmp_path), False)[0]
    for world_size, layout, steps in (
        (1, "plain", (3, 5)),
        (3, "fsdp", (3, 4)),
        (4, "hsdp", (5,)),
        (2, "tp", (3,)),
        (4, "tp_fsdp", (4, 5)),
        (2, "plain", (3,)),
    ):
        results = run_on(world_size)(resume, layout, str(tmp_path), False, steps)
        check(reference, results, steps)


def test_a_checkpoint_of_tensor_parallelism_comes_back(run_on: Ranks, tmp_path: Path) -> None:
    reference, _ = run_on(4)(train_and_save, "tp_fsdp", str(tmp_path), False)[0]
    check(reference, run_on(2)(resume, "fsdp", str(tmp_path), False, (5,)), (5,))


def refused(rank: int, world_size: int) -> list[str]:
    """A whole tensor for a shard, NaN in one shard, and a foreign state cut to shards."""
    model, optimizer = make("fsdp")
    runs.train(model, optimizer, 1, 1)
    whole = copy.deepcopy(optimizer.state_dict())
    momentum = whole["state"][0]["momentum_buffer"]
    whole["state"][0]["momentum_buffer"] = models.whole(momentum)
    damaged = copy.deepcopy(optimizer.state_dict())
    local_tensor(damaged["state"][0]["momentum_buffer"]).view(-1)[0] = torch.nan
    loads = [functools.partial(optimizer.load_state_dict, state) for state in (whole, damaged)]
    return [raised(load) for load in loads]


def test_what_does_not_fit_a_shard_is_refused(run_on: Ranks) -> None:
    for plain, damaged in run_on(2)(refused):
        assert "found a plain tensor, expected a DTensor (Shard(dim=0),)" in plain
        assert "momentum_buffer: found NaN or inf" in damaged
