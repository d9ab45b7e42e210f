"""Stop signals: torchtitan's trainer saves and leaves at the next step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.trainer as titan

from torchtitan_ext.plugin.checkpoints import CheckpointManager
from torchtitan_ext.plugin.metrics import progress
from torchtitan_ext.plugin.optimizers import check_last_update
from torchtitan_ext.signals import StopRequest, stop_request


class StopVote:
    """Whether a signal asked any rank to stop; one question at a time.

    Args:
        device: Device of the collectives.
    """

    def __init__(self, device: torch.device) -> None:
        self._votes = torch.zeros(1, dtype=torch.int32, device=device)
        self._event: Any = None
        self._result = self._votes
        if device.type != "cpu":
            self._event = torch.get_device_module(device).Event()
            self._result = torch.zeros(1, dtype=torch.int32, pin_memory=True)

    def ask(self, is_made: bool) -> None:
        """Ask all ranks, on an accelerator without waiting for them or for the device."""
        self._votes.fill_(int(is_made))  # by a kernel: a copy to the device would wait for it
        dist.all_reduce(self._votes, dist.ReduceOp.MAX)
        if self._event is not None:
            self._result.copy_(self._votes, non_blocking=True)
            self._event.record()

    def answer(self) -> bool:
        """Whether any rank had a request when it was asked; waits for what came before that."""
        if self._event is not None:
            self._event.synchronize()
        return bool(self._result.item())


def install() -> None:
    """Make torchtitan's trainer and its subclasses stop on a signal; a no-op when repeated.

    SIGTERM or SIGINT on any rank ends training at the next step, after a checkpoint of it, on all
    ranks alike. An override is imported while torchtitan builds its trainer, whose class no
    section of a config names: its methods are replaced. Runs whose checkpoints are not the
    project's train as before.
    """
    if not hasattr(titan.Trainer.train, "stock"):
        titan.Trainer.train = _replacement(titan.Trainer.train, _train)
        titan.Trainer.should_continue_training = _replacement(
            titan.Trainer.should_continue_training, _should_continue
        )


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
    with stop_request() as request:
        request.grace = float(trainer.config.checkpoint.stop_seconds)
        trainer.ballot = ballot = Ballot(request, StopVote(trainer.device))
        trainer.metrics_processor.callbacks.attach(trainer)
        stock(trainer)
        trainer.checkpointer.maybe_wait_for_saving()
        check_last_update(trainer.optimizers)  # no further step would report it
        if ballot.has_stopped:
            result = "saved" if trainer.checkpointer.saves else "not saved: checkpoints are off"
            progress.info("stopped at step %d, which is %s", trainer.step, result)


def _should_continue(stock: Callable[[Any], bool], trainer: Any) -> bool:
    """Whether there is a next step; where training stops before its end, after a save."""
    has_next = stock(trainer)
    ballot: Ballot | None = getattr(trainer, "ballot", None)
    if ballot is None:
        return has_next
    ballot.end_step()
    if not has_next:
        return False
    if ballot.stops():
        trainer.checkpointer.save_and_wait(trainer.step)
        ballot.has_stopped = True
        trainer.metrics_processor.callbacks.run("on_stop", trainer.step)
        return False
    # Ranks are asked before a step and answer after it: a wait would leave the device idle while
    # data is read.
    ballot.ask()
    return True


class Ballot:
    """The question before each step whether ranks stop, and its answer after the step.

    Args:
        request: Stop request of this process.
        vote: Vote of all ranks.

    Attributes:
        has_stopped: Whether training ended before its last step.
    """

    def __init__(self, request: StopRequest, vote: StopVote) -> None:
        self._request, self._vote = request, vote
        self._is_asked = False
        self.has_stopped = False

    def ask(self) -> None:
        """Ask all ranks; a collective."""
        self._vote.ask(self._request.is_made())
        self._is_asked = True

    def end_step(self) -> None:
        """Note a step, after which there is something to save; before the first one a no-op."""
        self._request.has_trained = self._is_asked

    def stops(self) -> bool:
        """Whether any rank had a request when all were last asked; False before the first step."""
        return self._is_asked and self._vote.answer()
