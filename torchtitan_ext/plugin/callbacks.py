"""Callbacks: code of a user at fixed points of a run.

``[metrics] callbacks`` of a file, or ``callbacks`` of an override, names classes by import path.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from torchtitan_ext.imports import import_class
from torchtitan_ext.runs.run_files import VALIDATION


class Callback:
    """Base class of callbacks; methods do nothing until a subclass defines them.

    Each rank makes its own object, without arguments, and calls its methods at the same points, so
    that they may use collectives. Steps count from 1. An error ends the run and names callback,
    rank and step.

    Attributes:
        trainer: torchtitan's trainer, with ``model_parts``, ``optimizers`` and ``config``; set
            before the first call.
    """

    trainer: Any = None

    def before_step(self, step: int) -> None:
        """Run before the data of a step are read."""

    def after_step(self, step: int) -> None:
        """Run after the optimizer's step; gradients are still there."""

    def on_plan(self, step: int, plan: Mapping[str, Any]) -> None:
        """Run after the step in which AMO made a plan; ``plan`` is the content of ``plan.json``."""

    def on_save(self, step: int) -> None:
        """Run after a checkpoint was written; with ``async_mode``, after its copy was taken."""

    def on_stop(self, step: int) -> None:
        """Run after the last step where a signal ends the run, and after its checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """Return what checkpoints hold of the callback: tensors, DTensors, numbers, texts.

        A load fills its tensors in place, and then calls :meth:`load_state_dict`. A callback that
        does not define this method has no state.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of a checkpoint, before the first step."""

    def log_metrics(self, step: int, record: Mapping[str, Any]) -> Mapping[str, float] | None:
        """Return figures by name to log with a step, in ``metrics.jsonl`` and everywhere else.

        Args:
            step: Step that is logged.
            record: Record of the step in ``metrics.jsonl``, with ``loss``, ``lr``, ``phase``.
        """
        return None


class CallbackError(Exception):
    """A callback failed; names the callback, the rank and the step."""


class Callbacks:
    """Callbacks of a run, called in the order of their list.

    Args:
        paths: Import paths of subclasses of :class:`Callback`.

    Raises:
        ValueError: A path names no callback.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        field = "metrics.callbacks"
        if repeated := [path for path in paths if paths.count(path) > 1]:
            raise ValueError(f"{field}: found {repeated[0]!r} twice, expected each once")
        self._callbacks = [(path, import_class(path, Callback, field)()) for path in paths]
        self._stateful = {
            path: callback
            for path, callback in self._callbacks
            if type(callback).state_dict is not Callback.state_dict
        }

    def attach(self, trainer: Any) -> None:
        """Show callbacks their trainer, and have them run after its checkpoints."""
        for _, callback in self._callbacks:
            callback.trainer = trainer
        trainer.checkpointer.on_save = functools.partial(self.run, "on_save")
        if self._stateful and trainer.checkpointer.enable:
            trainer.checkpointer.states["callbacks"] = self

    def state_dict(self) -> dict[str, Any]:
        """State of the callbacks that have one, by import path."""
        return {path: callback.state_dict() for path, callback in self._stateful.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned."""
        for path, callback in self._stateful.items():
            callback.load_state_dict(state[path])

    def run(self, method: str, step: int, *arguments: Any) -> list[Any]:
        """Call a method of all callbacks, and return their results.

        Raises:
            CallbackError: On the rank where a callback fails.
        """
        results = []
        for path, callback in self._callbacks:
            try:
                results.append(getattr(callback, method)(step, *arguments))
            except Exception as error:
                rank = dist.get_rank() if dist.is_initialized() else 0
                raise CallbackError(
                    f"metrics.callbacks: {path}.{method} failed on rank {rank} at step {step}: "
                    f"{type(error).__name__}: {error}"
                ) from error
        return results

    def figures(self, step: int, record: Mapping[str, Any]) -> dict[str, float]:
        """Figures of all callbacks for a logged step.

        Raises:
            ValueError: A figure has the name of another one, or is no number.
            CallbackError: On the rank where a callback fails.
        """
        figures: dict[str, float] = {}
        results = self.run("log_metrics", step, record)
        for (path, _), result in zip(self._callbacks, results, strict=True):
            try:
                own = {name: float(value) for name, value in (result or {}).items()}
            except Exception as error:
                raise ValueError(
                    f"metrics.callbacks: found {result!r} of {path}.log_metrics at step {step}, "
                    "expected numbers by name"
                ) from error
            # A record with the loss of a validation is read as that validation.
            if taken := sorted(own.keys() & {*record, *figures, VALIDATION}):
                raise ValueError(
                    f"metrics.callbacks: found two figures {taken[0]!r} at step {step}, expected "
                    "another name for that of log_metrics"
                )
            figures |= own
        return figures
