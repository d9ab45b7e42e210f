"""What ``amo watch`` and ``amo report`` read, written by a training loop of one's own."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from amo_dist.optimizers.muon import Muon
from amo_dist.schedule.amo import AMOPolicy
from amo_dist.schedule.plan import PLAN_FILE
from amo_dist.tools import files
from amo_dist.tools.records import METRICS_FILE, append_records, drop_from, read_records


@dataclass(frozen=True, slots=True)
class Report:
    """What an optimizer tells a logger about its latest step.

    Attributes:
        phase: ``uniform``, ``observation``, ``transition`` or ``locked``; empty for other
            optimizers than the Muon family.
        num_steps_by_type: Newton-Schulz steps of each operator type.
        metrics: Further figures by name.
        plan: AMO's plan as JSON, once there is one.
        lock_step: Where AMO locks its plan; None where it locks none.
    """

    phase: str = ""
    num_steps_by_type: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    plan: str | None = None
    lock_step: int | None = None


def report(optimizer: object) -> Report:
    """The report on the latest step; empty for what is none of the Muon family."""
    if not isinstance(optimizer, Muon):
        return Report()
    phase, num_steps = in_force(optimizer)
    amo = optimizer.policy.config if isinstance(optimizer.policy, AMOPolicy) else None
    return Report(
        phase=phase,
        num_steps_by_type=num_steps,
        metrics={**optimizer.metrics()},
        plan=None if optimizer.plan is None else optimizer.plan.to_json(),
        lock_step=None if amo is None or amo.observe_only else amo.lock_step,
    )


def in_force(optimizer: object, ago: int = 0) -> tuple[str, dict[str, int]]:
    """Phase and Newton-Schulz steps by type, of the latest step or of one ``ago`` steps before."""
    if not isinstance(optimizer, Muon):
        return "", {}
    step = max(optimizer.num_steps_taken - ago, 1)
    schedules = optimizer.schedules_by_group(step)
    return optimizer.phase_at(step), {name: one.num_steps for name, one in schedules.items()}


def changes(optimizer: object, last: Mapping[str, Any] | None, step: int) -> list[dict[str, Any]]:
    """Steps since the last record from which on phase or Newton-Schulz steps are others.

    Args:
        optimizer: Which has just taken ``step``.
        last: The last record; None for none.
        step: Of the record to come.
    """
    last = last or {"step": 0}
    before, found = (last.get("phase"), last.get("num_steps_by_type")), []
    for one in range(last["step"] + 1, step + 1):
        now = in_force(optimizer, step - one)
        if now != before:
            found.append({"step": one, "phase": now[0], "num_steps_by_type": now[1]})
        before = now
    return found


class RunLog:
    """Writes ``metrics.jsonl`` and ``plan.json`` into a folder, from the first rank alone.

    ``log = RunLog("outputs/run", optimizer, num_steps=1000)`` before the loop, and in it
    ``log(loss)`` after ``optimizer.step()``, as often as one likes: then ``amo watch outputs/run``
    and ``amo report outputs/run`` work. A loop that goes on from a checkpoint goes on here.

    Args:
        folder: Made where it is missing; one for each run.
        optimizer: Of the Muon family; of others there are loss, rate and speed.
        num_steps: Of the whole run, where it is known.
    """

    def __init__(
        self, folder: str | Path, optimizer: torch.optim.Optimizer, num_steps: int | None = None
    ) -> None:
        self._folder, self._optimizer, self._num_steps = Path(folder), optimizer, num_steps
        self._writes = not dist.is_initialized() or dist.get_rank() == 0
        self._last: Mapping[str, Any] | None = None
        self._step: int | None = None
        self._time = time.perf_counter()
        self._plan: str | None = None

    def __call__(
        self, loss: float | torch.Tensor, step: int | None = None, **figures: float | torch.Tensor
    ) -> None:
        """Write down the step just taken.

        Args:
            loss: In nats per token; a tensor is read, which waits for its device.
            step: Its number from 1 on; the optimizer's own count by default.
            **figures: Further numbers, such as ``grad_norm``, or ``num_tokens`` so far, from which
                tokens a second follow.

        Raises:
            ValueError: ``step`` is missing with an optimizer of another family, or the file of
                records cannot be read.
        """
        if not self._writes:
            return
        if step is None:
            if not isinstance(self._optimizer, Muon):
                kind = type(self._optimizer).__name__
                raise ValueError(f"step: found none with {kind}, expected the number of the step")
            step = self._optimizer.num_steps_taken
        path = self._folder / METRICS_FILE
        if self._step is None:  # what an earlier start wrote for later steps is no more
            self._folder.mkdir(parents=True, exist_ok=True)
            drop_from(path, step)
            (self._folder / PLAN_FILE).unlink(missing_ok=True)  # comes back where there is one
            self._last = next((r for r in reversed(read_records(path)) if "loss" in r), None)
            self._step = step - 1
        now, found = time.perf_counter(), report(self._optimizer)
        seconds, num_steps = now - self._time, max(step - self._step, 1)
        numbers = {name: _read(value) for name, value in figures.items()}
        tokens, before = numbers.get("num_tokens"), (self._last or {}).get("num_tokens") or 0.0
        record = {
            "step": step,
            "training_steps": self._num_steps,
            "lock_step": found.lock_step,
            "loss": _read(loss),
            "lr": float(self._optimizer.param_groups[0]["lr"]),
            "seconds_per_step": seconds / num_steps,
            "optimizer_seconds_per_step": found.metrics.get("optimizer/seconds"),
            "tokens_per_second": None if tokens is None else (tokens - before) / seconds,
            "phase": found.phase,
            "num_steps_by_type": found.num_steps_by_type,
            "changes": changes(self._optimizer, self._last, step),
            "optimizer": found.metrics,
            **numbers,
        }
        append_records(path, [record])
        if found.plan is not None and found.plan != self._plan:
            files.replace(self._folder / PLAN_FILE, found.plan + "\n")
            self._plan = found.plan
        self._last, self._step, self._time = record, step, now


def _read(value: float | torch.Tensor) -> float:
    """A loss is given as the loop has it: with its graph."""
    return float(value.detach() if isinstance(value, torch.Tensor) else value)
