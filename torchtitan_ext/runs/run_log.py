"""Run log of your own training loop, for ``amo report``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from amo_dist.optimizers.muon import Muon
from amo_dist.schedule.source import Amo
from torchtitan_ext.runs.run_files import RunFiles
from torchtitan_ext.runs.step_clock import StepClock


def optimizer_fields(optimizer: object) -> dict[str, Any]:
    """Fields of a record about the latest step of an optimizer.

    Returns:
        ``phase``: ``uniform``, ``observation``, ``transition`` or ``locked``. ``lock_step``: step
        at which AMO locks its plan; None without a plan to lock. ``num_steps_by_type``:
        Newton-Schulz steps of each operator type. ``optimizer``: further figures by name. All are
        empty for optimizers outside of the Muon family.
    """
    if not isinstance(optimizer, Muon):
        return {"lock_step": None, "phase": "", "num_steps_by_type": {}, "optimizer": {}}
    source, step = optimizer.source, max(optimizer.num_steps_taken, 1)
    schedules = optimizer.schedules_by_type(step)
    return {
        "lock_step": source.config.lock_step if isinstance(source, Amo) else None,
        "phase": source.phase(step),
        "num_steps_by_type": {name: s.num_steps for name, s in schedules.items()},
        "optimizer": {**optimizer.metrics()},
    }


class RunLog:
    """Writes ``metrics.jsonl`` and ``plan.json`` into a folder, from the first rank alone.

    Make ``log = RunLog("outputs/run", optimizer, num_steps=1000)`` before the loop, and call
    ``log(loss)`` after ``optimizer.step()``, at any interval; ``amo report outputs/run``
    then works. A loop that resumes from a checkpoint continues the log.

    Args:
        folder: Folder of this run alone; created if missing.
        optimizer: Optimizer of the run. One outside of the Muon family logs loss, rate and speed.
        num_steps: Steps of the whole run; None if unknown.
    """

    def __init__(
        self, folder: str | Path, optimizer: torch.optim.Optimizer, num_steps: int | None = None
    ) -> None:
        self._optimizer, self._num_steps = optimizer, num_steps
        writes = not dist.is_initialized() or dist.get_rank() == 0
        self._files = RunFiles(Path(folder)) if writes else None
        self._step: int | None = None
        self._time = time.perf_counter()
        self._clock = StepClock(optimizer.param_groups[0]["params"][0].device)
        if writes:
            optimizer.register_step_pre_hook(self._clock.start)
            optimizer.register_step_post_hook(self._clock.stop)

    def __call__(
        self, loss: float | torch.Tensor, step: int | None = None, **figures: float | torch.Tensor
    ) -> None:
        """Log the step just taken.

        Args:
            loss: Loss in nats per token; reading a tensor waits for its device.
            step: Number of the step, from 1 on; None for the optimizer's own count.
            **figures: Further numbers, such as ``grad_norm``. ``num_tokens`` is the total so far,
                from which tokens per second follow.

        Raises:
            ValueError: ``step`` is None with an optimizer outside of the Muon family, or the file
                of records cannot be read.
        """
        if self._files is None:
            return
        if step is None:
            if not isinstance(self._optimizer, Muon):
                kind = type(self._optimizer).__name__
                raise ValueError(f"step: found none with {kind}, expected the number of the step")
            step = self._optimizer.num_steps_taken
        if self._step is None:  # a run that resumes repeats the later steps of an earlier one
            self._files.start(step)
            self._step = step - 1
        now = time.perf_counter()
        seconds, num_steps = now - self._time, max(step - self._step, 1)
        numbers = {name: _number(value) for name, value in figures.items()}
        tokens, last = numbers.get("num_tokens"), self._files.last or {}
        record = {
            "step": step,
            "training_steps": self._num_steps,
            "loss": _number(loss),
            "lr": float(self._optimizer.param_groups[0]["lr"]),
            "seconds_per_step": seconds / num_steps,
            "optimizer_seconds_per_step": self._clock.take() / num_steps,
            "tokens_per_second": tokens and (tokens - (last.get("num_tokens") or 0.0)) / seconds,
            **optimizer_fields(self._optimizer),
            **numbers,
        }
        self._files.append(record)
        self._files.save_plan(getattr(self._optimizer, "plan", None))
        self._step, self._time = step, now


def _number(value: float | torch.Tensor) -> float:
    """Read a number; a loss may still have its graph."""
    return float(value.detach() if isinstance(value, torch.Tensor) else value)
