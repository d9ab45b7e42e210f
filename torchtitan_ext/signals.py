"""Signals of a process that trains: requests to stop, and the death of its parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

STOPPED = 75
"""Exit status of a run that was stopped before its end: the same command goes on. `sysexits.h`
calls it EX_TEMPFAIL, a failure for now."""

OUTCOME_FILE = "outcome"
"""File beside torchrun's error file in which a rank that ended in order leaves its outcome."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def handled(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Handle SIGTERM and SIGINT while the context lasts; main thread only."""
    previous = {number: signal.signal(number, handler) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


def end_at_once(*_: Any) -> None:
    """End this process, which has made no step, as stopped."""
    os.write(2, b"stopped before the first step: there is nothing to save\n")
    os._exit(STOPPED)


def end_with_parent(parent: int) -> None:
    """Make the kernel terminate this process when its parent is gone (Linux; elsewhere a no-op).

    A killed torchrun leaves its ranks running, and the next start would train beside them.

    Args:
        parent: Process that started this one. The kernel does not signal the death of a parent
            that died before this call, so this process then ends at once.
    """
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)


def write_exit_reason(outcome: str) -> None:
    """Write the outcome of this rank for its launcher; without torchrun a no-op.

    Args:
        outcome: ``done``; ``stopped``, with all steps saved; or ``unsaved``.
    """
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        Path(file).with_name(OUTCOME_FILE).write_text(outcome)


class StopSignal:
    """SIGTERM or SIGINT on any rank: all ranks stop at their next step, in a limited time.

    Schedulers announce a preemption by SIGTERM, and torchrun passes it on. A thread notices the
    signal even where the main thread waits in a collective for a rank that is gone. Before the
    first step there is nothing to save, so the thread ends the process at once: torchrun signals
    the compiler's processes too, and a compilation without them might never end. After it, the
    thread ends the process when its time is over.

    Attributes:
        has_trained: Whether this process made a step.
        has_stopped: Whether training ended before its last step.
        has_come: Whether this process got a signal.
        is_asked: Whether ranks were asked.
    """

    def __init__(self) -> None:
        self.has_trained = self.has_stopped = self.has_come = self.is_asked = False
        self._grace = 0.0

    def connect(self, device: Any, grace: float) -> None:
        """Prepare to ask all ranks.

        Args:
            device: Device of the collectives.
            grace: Seconds from a signal to the end of the process.
        """
        import torch

        self._grace = grace
        self._votes = self._result = torch.zeros(1, dtype=torch.int32, device=device)
        self._event: Any = None
        if device.type != "cpu":
            self._event = torch.get_device_module(device).Event()
            self._result = torch.zeros(1, dtype=torch.int32, pin_memory=True)

    def ask(self) -> None:
        """Ask all ranks, on an accelerator without waiting for them or for the device."""
        import torch.distributed as dist

        self._votes.fill_(int(self.has_come))  # a copy to the device would wait for it
        dist.all_reduce(self._votes, dist.ReduceOp.MAX)
        if self._event is not None:
            self._result.copy_(self._votes, non_blocking=True)
            self._event.record()
        self.is_asked = True

    def answer(self) -> bool:
        """Whether a signal had come to any rank when all were asked; waits for what came before."""
        if self._event is not None:
            self._event.synchronize()
        return bool(self._result.item())

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Listen for the signals while the context lasts; main thread only."""
        inbox, outbox = socket.socketpair()
        outbox.setblocking(False)
        # The interpreter runs handlers between two of its instructions: never, in a collective.
        # It writes a signal's number here at once.
        previous_fd = signal.set_wakeup_fd(outbox.fileno(), warn_on_full_buffer=False)
        is_over = threading.Event()
        thread = threading.Thread(target=self._watch, args=(inbox, is_over), daemon=True)
        thread.start()
        try:
            with handled(lambda *_: None):
                yield
        finally:
            signal.set_wakeup_fd(previous_fd)
            is_over.set()
            # A process that reads ahead has a copy, which a close here would leave open.
            outbox.shutdown(socket.SHUT_WR)
            outbox.close()
            thread.join()
            inbox.close()

    def _watch(self, inbox: socket.socket, is_over: threading.Event) -> None:
        while received := inbox.recv(1):
            if received[0] in _SIGNALS:
                self.has_come = True
                if not self.has_trained and not is_over.is_set():
                    write_exit_reason("stopped")
                    end_at_once()
                if not is_over.wait(self._grace):
                    os._exit(128 + received[0])
                return


_signals: list[StopSignal] = []


@contextlib.contextmanager
def stop_signal() -> Iterator[StopSignal]:
    """The stop signal of this process; an inner context has that of the outer one."""
    if _signals:
        yield _signals[0]
        return
    _signals.append(StopSignal())
    try:
        with _signals[0].listening():
            yield _signals[0]
    finally:
        _signals.clear()
