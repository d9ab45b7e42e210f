"""Run log of your own training loop, for ``amo report``."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from amo_dist.optimizers.muon import Muon
from amo_dist.schedule.source import Amo
from torchtitan_ext.runs.run_files import RunFiles
from torchtitan_ext.runs.step_clock import StepClock


@dataclass(frozen=True, slots=True)
class Report:
    """Report of an optimizer on its latest step.

    Attributes:
        phase: ``uniform``, ``observation``, ``transition`` or ``locked``; empty for optimizers
            outside of the Muon family.
        num_steps_by_type: Newton-Schulz steps of each operator type.
        metrics: Further figures by name.
        plan: AMO's plan as JSON; None before it is made.
        lock_step: Step at which AMO locks its plan; None without a plan to lock.
    """

    phase: str = ""
    num_steps_by_type: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    plan: str | None = None
    lock_step: int | None = None


def report(optimizer: object) -> Report:
    """Report on the latest step; empty for optimizers outside of the Muon family."""
    if not isinstance(optimizer, Muon):
        return Report()
    phase, num_steps = phase_and_steps(optimizer)
    amo = optimizer.source.config if isinstance(optimizer.source, Amo) else None
    return Report(
        phase=phase,
        num_steps_by_type=num_steps,
        metrics={**optimizer.metrics()},
        plan=None if optimizer.plan is None else optimizer.plan.to_json(),
        lock_step=None if amo is None or amo.observe_only else amo.lock_step,
    )


def phase_and_steps(optimizer: object, ago: int = 0) -> tuple[str, dict[str, int]]:
    """Phase and Newton-Schulz steps by type, ``ago`` optimizer steps before the latest one."""
    if not isinstance(optimizer, Muon):
        return "", {}
    step = max(optimizer.num_steps_taken - ago, 1)
    schedules = optimizer.schedules_by_type(step)
    return optimizer.phase_at(step), {name: s.num_steps for name, s in schedules.items()}


def changes(optimizer: object, last: Mapping[str, Any] | None, step: int) -> list[dict[str, Any]]:
    """List the steps since the last record at which the phase or Newton-Schulz steps changed.

    Args:
        optimizer: Optimizer that has just taken ``step``.
        last: Last record; None for none.
        step: Step of the next record.

    Returns:
        Records with ``step``, ``phase`` and ``num_steps_by_type``.
    """
    last = last or {"step": 0}
    before, records = (last.get("phase"), last.get("num_steps_by_type")), []
    for changed in range(last["step"] + 1, step + 1):
        now = phase_and_steps(optimizer, step - changed)
        if now != before:
            records.append({"step": changed, "phase": now[0], "num_steps_by_type": now[1]})
        before = now
    return records


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
        now, latest = time.perf_counter(), report(self._optimizer)
        seconds, num_steps = now - self._time, max(step - self._step, 1)
        numbers = {name: _number(value) for name, value in figures.items()}
        tokens, before = (
            numbers.get("num_tokens"),
            (self._files.last or {}).get("num_tokens") or 0.0,
        )
        record = {
            "step": step,
            "training_steps": self._num_steps,
            "lock_step": latest.lock_step,
            "loss": _number(loss),
            "lr": float(self._optimizer.param_groups[0]["lr"]),
            "seconds_per_step": seconds / num_steps,
            "optimizer_seconds_per_step": self._clock.take() / num_steps,
            "tokens_per_second": None if tokens is None else (tokens - before) / seconds,
            "phase": latest.phase,
            "num_steps_by_type": latest.num_steps_by_type,
            "changes": changes(self._optimizer, self._files.last, step),
            "optimizer": latest.metrics,
            **numbers,
        }
        self._files.append(record)
        if latest.plan is not None:
            self._files.save_plan(latest.plan)
        self._step, self._time = step, now


def _number(value: float | torch.Tensor) -> float:
    """Read a number; a loss may still have its graph."""
    return float(value.detach() if isinstance(value, torch.Tensor) else value)
