"""One rank of a run that saves through plain DCP, may be killed anywhere, and resumes."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import os
import signal
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

from amo_dist import AMO, AMOConfig, Muon, param_groups
from tests import runs
from tests.distributed import models
from torchtitan_ext import CheckpointReader, CheckpointWriter

STEPS, SEED = 12, 5
CONFIG = AMOConfig(**runs.PHASES, bucket_bytes=256, ns_guard_every=1)
SHAPES = {
    "tok_embeddings.weight": (5, 8),
    "layers.0.attention.wq.weight": (12, 8),
    "layers.0.attention.wk.weight": (3, 8),
    "layers.0.feed_forward.w1.weight": (13, 8),
    "layers.0.attention_norm.weight": (7,),
    "norm.weight": (8,),
}

SAVE_POINTS = ("in_save", "before_metadata", "before_checksums")


@dataclasses.dataclass(frozen=True)
class Kill:
    """The early end of a run.

    Attributes:
        step: Optimizer step; the save after it for `SAVE_POINTS`.
        point: ``before_step``, ``in_step``, or one of `SAVE_POINTS`.
        ranks: Ranks that are killed.
    """

    step: int
    point: str
    ranks: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of all ranks.

    Attributes:
        world_size: Number of ranks.
        layout: See `tests.distributed.models.make_model`; ``plain`` ranks are replicas.
        save_every: Steps from one checkpoint to the next.
        saves_async: Whether a checkpoint is written while training goes on.
        kill: The end of the run, if that is not the last step.
    """

    world_size: int
    layout: str
    save_every: int
    saves_async: bool
    kill: Kill | None = None


def _die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class _Writer(CheckpointWriter):
    """Writes a checkpoint, or ends the process in the middle of it."""

    def __init__(self, path: Path, die_at: str) -> None:
        super().__init__(path)
        self._die_at = die_at

    def write_data(self, plan: Any, planner: Any) -> Any:
        written = super().write_data(plan, planner)
        if self._die_at == "in_save":
            _die()
        return written

    def finish(self, metadata: Any, results: Any) -> None:
        # Called on one rank only, once every rank has written.
        stock = dcp.FileSystemWriter.finish

        def finish(*args: Any) -> None:
            if self._die_at == "before_metadata":
                _die()
            stock(*args)
            if self._die_at == "before_checksums":
                _die()

        with mock.patch.object(dcp.FileSystemWriter, "finish", finish):
            super().finish(metadata, results)


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


class _Saver:
    """Saves synchronously, or in the background through a process group of its own."""

    def __init__(self, folder: Path, run: Run, rank: int) -> None:
        self._folder, self._run, self._rank = folder, run, rank
        # The background thread's collectives would mix with those of training.
        self._group = dist.new_group(backend="gloo") if run.saves_async else None
        self._pending: Any = None

    def save(self, step: int, model: nn.Module, optimizer: AMO) -> None:
        self.wait()
        path = self._folder / f"step-{step:04}"
        kill = self._run.kill
        is_last = kill is not None and kill.step == step and self._rank in kill.ranks
        writer = _Writer(path, kill.point if kill is not None and is_last else "")
        state = state_of(model, optimizer)
        if self._run.saves_async:
            self._pending = dcp.async_save(state, storage_writer=writer, process_group=self._group)
        else:
            dcp.save(state, storage_writer=writer)

    def wait(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None


def make(run: Run) -> tuple[nn.Module, AMO]:
    """Model and optimizer before the first step."""
    model = models.make_model(run.layout, SHAPES)
    group = dist.group.WORLD if run.layout == "plain" and run.world_size > 1 else None
    return model, AMO(param_groups(model), lr=1e-2, config=CONFIG, process_group=group)


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
        run: Layout, checkpoints and kill.
        folder: Folder of the checkpoints.
        resumed: File for the step that the first rank goes on from, and for the errors before.

    Returns:
        The control state by step from the first on, and the whole parameters at the end.
    """
    quiet()
    if run.kill is not None:
        # The ranks left over say at length that one has gone.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    model, optimizer, errors = resume(run, folder)
    first = optimizer.num_steps_taken
    if resumed is not None:
        if rank == 0:
            resumed.write_text(json.dumps({"first": first, "errors": errors}))
        dist.barrier()  # or a kill of another rank could come before
    controls = {first: copy.deepcopy(optimizer.control_state_dict())}
    saver = _Saver(folder, run, rank)
    for step in range(first + 1, STEPS + 1):
        models.set_gradients(model, SEED, step)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1.0, 1.3 - 0.1 * step)
        kill = run.kill if run.kill and run.kill.step == step and rank in run.kill.ranks else None
        if kill and kill.point == "before_step":
            _die()
        if kill and kill.point == "in_step":
            with mock.patch("amo_dist.engine.step.orthogonalize", _die):
                optimizer.step()
            _die()  # this rank owned nothing
        optimizer.step()
        controls[step] = copy.deepcopy(optimizer.control_state_dict())
        if step % run.save_every == 0:
            saver.save(step, model, optimizer)
    saver.wait()
    return {"controls": controls, "params": runs.weights(model)}


def quiet() -> None:
    """Silence what runs of trials say without end."""
    # Residuals above the bound, and the stacks of errors that DCP raises anyway.
    logging.getLogger().setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "Detected an existing checkpoint")
