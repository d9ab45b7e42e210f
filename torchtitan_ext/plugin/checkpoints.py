"""Checkpoints of a run: which are kept, and errors when one cannot be written."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torchtitan.components.checkpointer as titan
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save
from torchtitan.tools.utils import GarbageCollection

from amo_dist.config import require
from torchtitan_ext.plugin import hyperparameters, loading
from torchtitan_ext.plugin.optimizers import check_last_update
from torchtitan_ext.plugin.storage import CheckpointWriter, delete, find_damage, innermost
from torchtitan_ext.runs.run_files import (
    COMPLETE_FILES,
    checkpoints,
    complete_steps,
    require_local,
)
from torchtitan_ext.runs.stores import is_remote, store_of

logger = logging.getLogger(__name__)

STATES = ("optimizer", "dataloader", "lr_scheduler", "train_state", "batch", "callbacks")
"""Names of what a checkpoint holds beside the model."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; those that were complete before still are."""


class CheckpointManager(titan.CheckpointManager):
    """torchtitan's manager, with corrections.

    All ranks load the checkpoint that the first rank finds. Only complete checkpoints count for
    ``keep_latest_k``: the rest of a killed save would otherwise take the place of the only
    checkpoint that can be loaded. A checkpoint that is written over is incomplete until it is whole
    again. A failed save is an error of one line, on every rank. Copies that run beside training
    begin when the optimizer's step has ended on the device. Schedules go on from the peak rate
    that ``[optimizer]`` chooses by ``on_config_change``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(titan.CheckpointManager.Config):
        """``[checkpoint]``.

        Attributes:
            initial_load_path: Checkpoint to start from if ``folder`` holds no complete one.
            initial_load_model_only: Whether only the weights of ``initial_load_path`` are loaded.
            last_save_model_only: Whether the last checkpoint of a run holds weights alone, as it
                does with ``last_save_in_hf``; such a run cannot go on with more steps.
            keep_every: Multiples of this step are kept, beside the newest ``keep_latest_k``; 0 for
                none.
            verify: Whether each start reads the whole checkpoint and compares checksums; without it
                a flipped bit is loaded.
            damaged: Start from a checkpoint whose checksums differ: ``skip`` takes the one before
                it, ``error`` stops.
            stop_seconds: Seconds that ranks have to save after a stop signal; then they end
                themselves.
        """

        initial_load_path: str | None = None
        initial_load_model_only: bool = True
        last_save_model_only: bool = False
        keep_every: int = 0
        verify: bool = True
        damaged: Literal["skip", "error"] = "skip"
        stop_seconds: int = 600

        def __post_init__(self) -> None:
            """Check the fields.

            Raises:
                ValueError: For a value out of range, or fields that contradict each other.
            """
            require(self.stop_seconds > 0, "stop_seconds", self.stop_seconds, "an integer >= 1")
            if self.initial_load_path and not is_remote(self.initial_load_path):
                self.initial_load_path = str(Path(self.initial_load_path).absolute())
            self.last_save_model_only |= self.last_save_in_hf
            model_only = self.initial_load_model_only
            if not (self.initial_load_path or self.initial_load_in_hf):
                self.initial_load_model_only = False  # torchtitan warns about its own default.
            titan.CheckpointManager.Config.__post_init__(self)
            self.initial_load_model_only = model_only
            expected = f"a multiple of checkpoint.interval, which is {self.interval}"
            is_right = self.keep_every >= 0 and self.keep_every % self.interval == 0
            require(is_right, "keep_every", self.keep_every, expected)

    on_save: Callable[[int], object] = staticmethod(lambda step: None)
    """Function of the step, called after each save."""

    def __init__(self, config: Config, **parts: Any) -> None:
        # DCP would write to an object store, where no resume looks.
        require_local("dump_folder", parts.get("base_folder", ""))
        super().__init__(config, **parts)
        if self.enable:
            self.states["batch"] = hyperparameters.BatchSizes(self.states["train_state"])
        self._config = config
        self._latest_step = -1
        self._step_under_way = -1
        self._saved_step = -1

    def _load(self, step: int = -1) -> bool:
        """Load the checkpoint of ``step``, by default the latest complete one, or initial weights.

        Raises:
            ValueError: On every rank, if a rank does not find the checkpoint of the first one.
        """
        if step == -1:
            self._latest_step = self._agree_on_latest_step()
        has_loaded: bool = super()._load(step)
        if has_loaded:
            hyperparameters.follow(self.states[titan.LR_SCHEDULER])
        return has_loaded

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Load a checkpoint.

        Raises:
            ValueError: If it lacks a key that this run needs, is damaged, or would run code.
        """
        if from_hf:
            with loading.explained(checkpoint_id):
                super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        is_verified = checkpoint_id == self._create_checkpoint_id(self._latest_step)
        loading.load(state_dict, checkpoint_id, verify=self._config.verify and not is_verified)
        self.states[titan.MODEL].load_state_dict(state_dict)

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: titan.AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Save like torchtitan, with checksums."""
        if to_hf:
            return super().dcp_save(
                state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf
            )
        to: dict[str, Any] = {
            "storage_writer": CheckpointWriter(checkpoint_id),
            "checkpoint_id": checkpoint_id,
        }
        if async_mode == titan.AsyncMode.DISABLED:
            save(state_dict, **to)
            if enable_garbage_collection:
                GarbageCollection.collect("GC collection invoked by checkpointer.")
            return None
        if async_mode == titan.AsyncMode.ASYNC_WITH_PINNED_MEM:
            to |= {
                "async_checkpointer_type": AsyncCheckpointerType.PROCESS,
                "async_stager": self.stager,
            }
        return async_save(state_dict, process_group=self.pg, **to)

    def _find_load_step(self, folder: str = "") -> int:
        return self._latest_step

    def _agree_on_latest_step(self) -> int:
        """The latest complete, undamaged step that the first rank finds; -1 for none.

        Raises:
            ValueError: On every rank, if all are damaged, or one is and ``damaged`` is ``error``.
        """
        shared = [complete_steps(self.folder)]
        dist.broadcast_object_list(shared, src=0)
        (steps,) = shared
        incomplete = checkpoints(self.folder)
        if not steps and incomplete and dist.get_rank() == 0:
            logger.warning(
                "no checkpoint in %s is complete (a save was cut short: %s); the run starts anew",
                self.folder,
                ", ".join(f"step-{step}" for step in incomplete),
            )
        for step in reversed(steps):
            damage = self._agree_on_damage(step)
            if not damage:
                return int(step)
            line = f"{self._create_checkpoint_id(step)} is damaged: {damage}"
            if self._config.damaged == "error":
                raise ValueError(f"{line}; checkpoint.damaged = 'skip' goes on from one before it")
            if dist.get_rank() == 0:
                logger.warning("%s; looking for one before it", line)
        if steps:
            raise ValueError(
                f"{line}, and no checkpoint before it can be read; expected one, or another "
                "checkpoint.folder to start anew"
            )
        return -1

    def _agree_on_damage(self, step: int) -> str:
        """The first damage that ranks find in a checkpoint, whose files they share; or empty.

        Raises:
            ValueError: On every rank, if the folder is missing on any: a rank that raised alone
                would leave the others waiting.
        """
        folder = self._create_checkpoint_id(step)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        damage = None
        if store_of(folder).isdir(""):
            damage = find_damage(folder, rank, world_size) if self._config.verify else ""
        damage_by_rank: list[str | None] = [""] * world_size
        dist.all_gather_object(damage_by_rank, damage)
        missing = [str(rank) for rank, damage in enumerate(damage_by_rank) if damage is None]
        if missing:
            raise ValueError(
                f"checkpoint.folder: found no step-{step} in {self.folder} on rank(s) "
                f"{', '.join(missing)}, expected it as on the first rank: checkpoints belong on a "
                "file system that all ranks share"
            )
        return next(filter(None, damage_by_rank), "")

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save if torchtitan would; returns whether it did.

        Raises:
            CheckpointError: On every rank, if a rank could not write its part of this checkpoint
                or, with an asynchronous mode, of the one before.
            NonFiniteUpdateError: On every rank, before anything is written, if the last step left
                out an update that was NaN or inf.
        """
        if not self._should_save(curr_step, last_step):
            return False
        check_last_update(self.states[titan.OPTIMIZER])
        self.maybe_wait_for_saving()  # of the last checkpoint, whose step an error names
        self._step_under_way = curr_step
        if dist.get_rank() == 0:
            # No rank writes before this one has handed out the work.
            delete(self._create_checkpoint_id(curr_step), COMPLETE_FILES)
        if self.async_mode == titan.AsyncMode.ASYNC_WITH_PINNED_MEM:
            # PyTorch copies on a stream that waits for no other: it would read parameters and
            # state before the last kernels of the step have written them.
            torch.accelerator.synchronize()
        with self._explaining():
            super()._save(curr_step, last_step)
        self._saved_step = curr_step
        self.on_save(curr_step)
        return True

    @property
    def saves(self) -> bool:
        """Whether checkpoints are written."""
        return self.enable and not self.load_only

    def save_and_wait(self, step: int) -> None:
        """Save all state, unless ``step`` is saved, and wait for the disk.

        Raises:
            CheckpointError: A rank could not write its part.
        """
        if not self.saves:
            return
        if self._saved_step != step:
            # torchtitan's last save may be weights alone, in another format: no resume.
            self.last_save_model_only = self.last_save_in_hf = False
            self.save(step, last_step=True)
        self.maybe_wait_for_saving()

    def _wait_for_saving(self) -> None:
        with self._explaining():
            super()._wait_for_saving()

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Turn the error of a save into one line with the newest complete checkpoint."""
        try:
            yield
        except (CheckpointException, OSError) as error:
            steps = {*complete_steps(self.folder)} - {self._step_under_way}
            newest = f"step {max(steps)} is the newest complete one" if steps else "there is none"
            raise CheckpointError(
                f"the checkpoint of step {self._step_under_way} could not be written to "
                f"{self.folder}: {innermost(error)}; {newest}"
            ) from error

    def _purge_stale_checkpoints(self) -> None:
        if not self._should_purge():
            return
        current = self._step_under_way
        older = [step for step in complete_steps(self.folder) if step < current]
        every = self._config.keep_every
        milestones = (step for step in older if every and not step % every)
        kept = {current, *older[-(self.keep_latest_k - 1) :], *milestones}
        for step in checkpoints(self.folder):
            if step < current and step not in kept:
                self.purge_queue.put(self._create_checkpoint_id(step))
