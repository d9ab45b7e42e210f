"""Checkpoints of a run: what is kept, what is told when one cannot be written."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.components.checkpointer as titan
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save
from torchtitan.tools.filesystem import is_remote
from torchtitan.tools.utils import GarbageCollection

from amo_dist import CheckpointWriter
from amo_dist.state.storage import find_damage
from torchtitan_ext.plugin import hyperparameters, loading
from torchtitan_ext.plugin.optimizers import check_last_update
from torchtitan_ext.runs.run_files import COMPLETE_FILES, checkpoints, complete_steps

logger = logging.getLogger(__name__)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; those that were complete before still are."""


class CheckpointManager(titan.CheckpointManager):
    """torchtitan's manager, with corrections.

    All ranks load what the first one sees. Only complete checkpoints count for ``keep_latest_k``:
    what a killed save left behind would otherwise take the place of the one checkpoint that can be
    loaded. A checkpoint that is written over is incomplete until it is whole again. A failed save
    is told in one line, on every rank. Copies that run beside training begin when the optimizer's
    step has ended on the device. Schedules go on from the peak rate that ``[optimizer]`` decides
    for.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(titan.CheckpointManager.Config):
        """``[checkpoint]``."""

        initial_load_path: str | None = None
        """Checkpoint to start from where there is no complete one in ``folder``."""

        initial_load_model_only: bool = True
        """Whether what ``initial_load_path`` names gives weights alone."""

        damaged: str = "skip"
        """A checkpoint whose files are not as they were written: ``skip`` goes on from the one
        before it, ``error`` stops."""

        stop_seconds: int = 600
        """How long ranks that are told to stop may take to save; then they end themselves."""

        def __post_init__(self) -> None:
            """Check the fields.

            Raises:
                ValueError: For a value out of range, or fields that contradict each other.
            """
            if self.damaged not in ("skip", "error"):
                raise ValueError(
                    f"checkpoint.damaged: found {self.damaged!r}, expected 'skip' or 'error'"
                )
            if self.stop_seconds < 1:
                raise ValueError(
                    f"checkpoint.stop_seconds: found {self.stop_seconds}, expected an integer >= 1"
                )
            if is_remote(self.folder):
                raise ValueError(
                    f"checkpoint.folder: found {self.folder!r}, expected a folder of a file system"
                )
            if self.initial_load_path and not is_remote(self.initial_load_path):
                self.initial_load_path = str(Path(self.initial_load_path).absolute())
            given = self.initial_load_model_only
            if not (self.initial_load_path or self.initial_load_in_hf):
                self.initial_load_model_only = False  # torchtitan warns of its own default
            titan.CheckpointManager.Config.__post_init__(self)
            self.initial_load_model_only = given

    on_save: Callable[[int], object] = staticmethod(lambda step: None)
    """Function of the step, called after each save."""

    def __init__(self, config: Config, **parts: Any) -> None:
        super().__init__(config, **parts)
        self._skips_damaged = config.damaged == "skip"
        self._latest_step = -1
        self._step_under_way = -1
        self._saved_step = -1

    def _load(self, step: int = -1) -> bool:
        """Load the checkpoint of ``step``, by default the latest complete one, or initial weights.

        Raises:
            ValueError: If a rank does not see the checkpoint that the first one found.
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
        """Load what a checkpoint holds.

        Raises:
            ValueError: If it lacks something.
        """
        if from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        is_verified = checkpoint_id == self._create_checkpoint_id(self._latest_step)
        loading.load(state_dict, checkpoint_id, verify=not is_verified)
        self.states[titan.MODEL].load_state_dict(state_dict)

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: titan.AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """As torchtitan, with checksums."""
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
        """The latest complete step that the first rank sees, undamaged; -1 where none is complete.

        Raises:
            ValueError: On every rank, if all are damaged, or one is and ``damaged`` says so.
        """
        found = [complete_steps(Path(self.folder))]
        dist.broadcast_object_list(found, src=0)
        incomplete = checkpoints(Path(self.folder))
        if not found[0] and incomplete and dist.get_rank() == 0:
            logger.warning(
                "no checkpoint in %s is complete (a save was cut short: %s); the run starts anew",
                self.folder,
                ", ".join(f"step-{step}" for step in incomplete),
            )
        for step in reversed(found[0]):
            damage = self._agree_on_damage(step)
            if not damage:
                return int(step)
            told = f"{self._create_checkpoint_id(step)} is damaged: {damage}"
            if not self._skips_damaged:
                raise ValueError(f"{told}; checkpoint.damaged = 'skip' goes on from one before it")
            if dist.get_rank() == 0:
                logger.warning("%s; looking for one before it", told)
        if found[0]:
            raise ValueError(
                f"{told}, and no checkpoint before it can be read; expected one, or another "
                "checkpoint.folder to start anew"
            )
        return -1

    def _agree_on_damage(self, step: int) -> str:
        """What the first rank that finds something finds wrong with a checkpoint; ranks share it.

        Raises:
            ValueError: If this rank does not see what the first one does.
        """
        folder = self._create_checkpoint_id(step)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        damage: list[str] = [""] * world_size
        seen = Path(folder).is_dir()
        dist.all_gather_object(damage, find_damage(Path(folder), rank, world_size) if seen else "")
        if not seen:
            raise ValueError(
                f"checkpoint.folder: found no step-{step} in {self.folder} on rank {rank}, "
                "expected what the first rank sees there: checkpoints belong on a file system "
                "that all ranks share"
            )
        return next(filter(None, damage), "")

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save where torchtitan would; returns whether it did.

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
            # The coordinator, which hands out the work: nobody writes before.
            for name in COMPLETE_FILES:
                Path(self._create_checkpoint_id(curr_step), name).unlink(missing_ok=True)
        if self.async_mode == titan.AsyncMode.ASYNC_WITH_PINNED_MEM:
            # PyTorch copies on a stream of its own, which waits for no other: it would read
            # parameters and state that the last kernels of the step have yet to write.
            torch.accelerator.synchronize()
        try:
            super()._save(curr_step, last_step)
        except (CheckpointException, OSError) as error:
            raise self._explained(error) from error
        self._saved_step = curr_step
        self.on_save(curr_step)
        return True

    def save_and_wait(self, step: int) -> None:
        """Save everything that a resume needs, unless ``step`` is saved, and wait for the disk.

        Raises:
            CheckpointError: As for a save.
        """
        if not self.enable or self.load_only:
            return
        if self._saved_step != step:
            # The last step of a run may save less, in another format.
            self.last_save_model_only = self.last_save_in_hf = False
            self.save(step, last_step=True)
        self.maybe_wait_for_saving()

    def _wait_for_saving(self) -> None:
        try:
            super()._wait_for_saving()
        except (CheckpointException, OSError) as error:
            raise self._explained(error) from error

    def _explained(self, error: BaseException) -> CheckpointError:
        complete = [
            step for step in complete_steps(Path(self.folder)) if step != self._step_under_way
        ]
        newest = f"step {max(complete)} is the newest complete one" if complete else "there is none"
        return CheckpointError(
            f"the checkpoint of step {self._step_under_way} could not be written to {self.folder}: "
            f"{_reason(error)}; {newest}"
        )

    def _purge_stale_checkpoints(self) -> None:
        if not self._should_purge():
            return
        current = self._step_under_way
        older = [step for step in complete_steps(Path(self.folder)) if step < current]
        kept = {current, *older[-(self.keep_latest_k - 1) :]}
        for step, folder in checkpoints(Path(self.folder)).items():
            if step < current and step not in kept:
                self.purge_queue.put(str(folder))


def _reason(error: BaseException) -> str:
    """The failure below all wrappers, and the rank it happened on."""
    rank = ""
    if isinstance(error, CheckpointException) and error.failures:
        number, (found, _) = min(error.failures.items(), key=lambda item: item[0])
        rank, error = f" (on rank {number})", found
    while error.__cause__ is not None:
        error = error.__cause__
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        text = os.strerror(errno.ENOSPC)
    return text + rank
