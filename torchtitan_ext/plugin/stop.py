"""Stop signals: torchtitan's trainer saves and leaves at the next step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torchtitan.trainer as titan

from torchtitan_ext.plugin.checkpoints import CheckpointManager
from torchtitan_ext.plugin.metrics import progress
from torchtitan_ext.plugin.optimizers import check_last_update
from torchtitan_ext.signals import StopSignal, stop_signal


def install() -> None:
    """Make torchtitan's trainer and its subclasses stop on a signal; a no-op when repeated.

    SIGTERM or SIGINT on any rank ends training at the next step, after a checkpoint of it, on all
    ranks alike. An override is imported while torchtitan builds its trainer, whose class no
    section of a config names: its methods are replaced. Runs whose checkpoints are not the
    project's train as before.
    """
    for name, method in (("train", _train), ("should_continue_training", _should_continue)):
        stock = getattr(titan.Trainer, name)
        if not hasattr(stock, "stock"):
            setattr(titan.Trainer, name, _replacement(stock, method))


def _replacement(stock: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that gets the stock one as its first argument."""
    replacement: Any = functools.wraps(stock)(lambda trainer: method(stock, trainer))
    replacement.stock = stock
    return replacement  # type: ignore[no-any-return]


def _train(stock: Callable[[Any], None], trainer: Any) -> None:
    """Train to the end, or to the step after a stop signal."""
    if not isinstance(trainer.checkpointer, CheckpointManager):
        stock(trainer)
        return
    with stop_signal() as signal:
        signal.connect(trainer.device, float(trainer.config.checkpoint.stop_seconds))
        trainer.stop_signal = signal
        trainer.metrics_processor.callbacks.attach(trainer)
        stock(trainer)
        trainer.checkpointer.maybe_wait_for_saving()
        check_last_update(trainer.optimizers)  # no further step would report it
        if signal.has_stopped:
            result = "saved" if trainer.checkpointer.saves else "not saved: checkpoints are off"
            progress.info("stopped at step %d, which is %s", trainer.step, result)


def _should_continue(stock: Callable[[Any], bool], trainer: Any) -> bool:
    """Whether there is a next step; where training stops before its end, after a save."""
    has_next = stock(trainer)
    signal: StopSignal | None = getattr(trainer, "stop_signal", None)
    if signal is None:
        return has_next
    signal.has_trained = signal.is_asked
    if not has_next:
        return False
    if signal.is_asked and signal.answer():
        trainer.checkpointer.save_and_wait(trainer.step)
        signal.has_stopped = True
        trainer.metrics_processor.callbacks.run("on_stop", trainer.step)
        return False
    # Ranks are asked before a step and answer after it: a wait would leave the device idle while
    # data is read.
    signal.ask()
    return True
