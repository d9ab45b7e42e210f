"""Stop signals: torchtitan's trainer saves and leaves when it is told to stop."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.trainer as titan

from amo_dist.distributed.absence import name_absent
from torchtitan_ext.plugin.checkpoints import CheckpointManager
from torchtitan_ext.plugin.metrics import progress
from torchtitan_ext.plugin.optimizers import check_last_update

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Whether this process was told to stop; it then has a limited time to do so.

    Schedulers announce a preemption by SIGTERM, and torchrun passes it on. A thread notices the
    signal even where the main thread waits in a collective for a rank that is gone, and ends the
    process when the time is over.

    Args:
        grace: Seconds from the signal to the end of the process.
    """

    def __init__(self, grace: float) -> None:
        self._is_made = threading.Event()
        self._grace = grace

    def is_made(self) -> bool:
        """Whether a signal has come."""
        return self._is_made.is_set()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take SIGTERM and SIGINT for the request while the context lasts; main thread only."""
        inbox, outbox = socket.socketpair()
        outbox.setblocking(False)
        previous = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
        # The interpreter runs handlers between two of its instructions: never, in a collective.
        # It writes a signal's number here at once.
        previous_fd = signal.set_wakeup_fd(outbox.fileno(), warn_on_full_buffer=False)
        is_over = threading.Event()
        thread = threading.Thread(target=self._watch, args=(inbox, is_over), daemon=True)
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(previous_fd)
            for number, handler in previous.items():
                signal.signal(number, handler)
            is_over.set()
            # A process that reads ahead has a copy, which a close here would leave open.
            outbox.shutdown(socket.SHUT_WR)
            outbox.close()
            thread.join()
            inbox.close()

    def _watch(self, inbox: socket.socket, is_over: threading.Event) -> None:
        while received := inbox.recv(1):
            if received[0] in _SIGNALS:
                self._is_made.set()
                if not is_over.wait(self._grace):
                    os._exit(128 + received[0])
                return


class StopVote:
    """Whether any rank was told to stop; one question at a time.

    Args:
        device: Of the collectives.
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
    """Have torchtitan's trainer and its subclasses stop on a signal; a no-op when repeated.

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
    """Train to the end, or until told to stop.

    Raises:
        AbsentRanksError: A collective failed as other ranks are gone or stopped; names them.
    """
    if not isinstance(trainer.checkpointer, CheckpointManager):
        stock(trainer)
        return
    request = StopRequest(grace=float(trainer.config.checkpoint.stop_seconds))
    vote = StopVote(trainer.device)
    trainer.ballot = ballot = Ballot(request, vote)
    trainer.metrics_processor.callbacks.attach(trainer)
    with request.listening():
        try:
            stock(trainer)
            trainer.checkpointer.maybe_wait_for_saving()
            check_last_update(trainer.optimizers)  # which no further step tells of
        except RuntimeError as error:
            name_absent(error, f"step {trainer.step}")
            raise
        if ballot.has_stopped:
            saves = trainer.checkpointer.enable and not trainer.checkpointer.load_only
            result = "saved" if saves else "not saved: checkpoints are off"
            progress.info("stopped at step %d, which is %s", trainer.step, result)


def _should_continue(stock: Callable[[Any], bool], trainer: Any) -> bool:
    """Whether there is a next step; where training stops before its end, after a save."""
    has_next = stock(trainer)
    ballot: Ballot | None = getattr(trainer, "ballot", None)
    if ballot is None or not has_next:
        return has_next
    if ballot.stops():
        trainer.checkpointer.save_and_wait(trainer.step)
        ballot.has_stopped = True
        trainer.metrics_processor.callbacks.run("on_stop", trainer.step)
        return False
    # Asked before a step, and heard after it: a wait here would leave the device idle while data
    # is read.
    ballot.ask()
    return True


class Ballot:
    """The question before each step whether ranks stop, and its answer after the step.

    Args:
        request: Request of this process.
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

    def stops(self) -> bool:
        """Whether any rank was told to stop when all were last asked; False before that."""
        return self._is_asked and self._vote.answer()
