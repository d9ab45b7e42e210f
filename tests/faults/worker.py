"""One rank of a run that saves through plain DCP, may be killed anywhere, and resumes."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import os
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from amo_dist import AMO, Muon
from tests import runs
from tests.distributed import models
from tests.faults.damage import SAVE_POINTS, die, fail_in_save
from torchtitan_ext import CheckpointReader, CheckpointWriter

STEPS, SEED = 12, 5
SHAPES = {**runs.SHAPES, "layers.0.attention.wk.weight": (3, 8), "norm.weight": (7,)}


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of all ranks.

    Attributes:
        world_size: Number of ranks.
        layout: See `tests.distributed.models.make_model`; ``plain`` ranks are replicas.
        save_every: Steps from one checkpoint to the next.
        saves_async: Whether a checkpoint is written while training goes on.
        kill_step: Optimizer step in which the run ends, or after which, for `SAVE_POINTS`.
        point: ``before_step``, ``in_step``, or one of `SAVE_POINTS`.
        killed: Ranks that are killed.
    """

    world_size: int
    layout: str
    save_every: int
    saves_async: bool = False
    kill_step: int = 0
    point: str = ""
    killed: tuple[int, ...] = ()


def state_of(model: nn.Module, optimizer: Muon, flatten: bool = False) -> dict[str, Any]:
    """The state that DCP saves."""
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }


def load(folder: Path, model: nn.Module, optimizer: Muon, flatten: bool = False) -> None:
    """Load what DCP has saved."""
    state = state_of(model, optimizer, flatten)
    assert optimizer.num_steps_taken == 0  # the helper took no step to make state
    dcp.load(state, storage_reader=CheckpointReader(folder))
    set_model_state_dict(model, state["model"])
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)


def make(run: Run) -> tuple[nn.Module, AMO]:
    """Model and optimizer before the first step."""
    return runs.make(run.layout, shapes=SHAPES, bucket_bytes=256, ns_guard_every=1)


def resume(run: Run, folder: Path) -> tuple[nn.Module, AMO, dict[str, list[str]]]:
    """A run from the newest readable checkpoint, or the start, and the errors of later ones.

    DCP renames metadata into place last of all: a checkpoint without it is not complete.
    """
    errors: dict[str, list[str]] = {}
    for path in sorted((path.parent for path in folder.glob("step-*/.metadata")), reverse=True):
        model, optimizer = make(run)
        try:
            load(path, model, optimizer)
        except CheckpointException as error:
            reasons = [reason for reason, _ in error.failures.values()]
            errors[path.name] = [f"{type(reason).__name__}: {reason}" for reason in reasons]
        else:
            return model, optimizer, errors
    return *make(run), errors


def train(
    rank: int, world_size: int, run: Run, folder: Path, resumed: Path | None = None
) -> dict[str, Any]:
    """From the newest checkpoint that can be read, or from the start, to the end.

    Args:
        rank: Rank of this process.
        world_size: Number of ranks.
        run: Layout, checkpoints and end.
        folder: Folder of the checkpoints.
        resumed: File for the step that the first rank goes on from, and for the errors before.

    Returns:
        The control state by step from the first on, and the whole parameters at the end.
    """
    # Residuals above the bound, and the stacks of errors that DCP raises anyway.
    logging.getLogger().setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "Detected an existing checkpoint")
    if run.killed:
        # The ranks left over say at length that one has gone.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    model, optimizer, errors = resume(run, folder)
    first = optimizer.num_steps_taken
    if resumed is not None:
        if rank == 0:
            resumed.write_text(json.dumps({"first": first, "errors": errors}))
        dist.barrier()  # or a kill of another rank could come before
    controls = {first: copy.deepcopy(optimizer.control_state_dict())}
    # The background thread's collectives would mix with those of training.
    group = dist.new_group(backend="gloo") if run.saves_async else None
    pending: Any = None
    point = run.point if rank in run.killed else ""
    if point in SAVE_POINTS:
        fail_in_save(run.kill_step, point)
    for step in range(first + 1, STEPS + 1):
        models.set_gradients(model, SEED, step)
        for group_of_params in optimizer.param_groups:
            group_of_params["lr"] = 1e-2 * min(1.0, 1.3 - 0.1 * step)
        if (point, step) == ("before_step", run.kill_step):
            die()
        if (point, step) == ("in_step", run.kill_step):
            with mock.patch("amo_dist.engine.step.orthogonalize", die):
                optimizer.step()
            die()  # this rank owned nothing
        optimizer.step()
        controls[step] = copy.deepcopy(optimizer.control_state_dict())
        if step % run.save_every == 0:
            if pending:
                pending.result()
            writer = CheckpointWriter(folder / f"step-{step:04}")
            state = state_of(model, optimizer)
            if run.saves_async:
                pending = dcp.async_save(state, storage_writer=writer, process_group=group)
            else:
                dcp.save(state, storage_writer=writer)
    if pending:
        pending.result()
    return {"controls": controls, "params": runs.weights(model)}
