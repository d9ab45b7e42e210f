"""Signals of a process that trains: requests to stop, and the death of its parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

STOPPED = 75
"""Exit status of a run that was stopped before its end: the same command goes on. `sysexits.h`
calls it EX_TEMPFAIL, a failure for now."""

OUTCOME_FILE = "outcome"
"""File beside torchrun's error file in which a rank that ended in order leaves its outcome."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


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


def leave_outcome(outcome: str) -> None:
    """Leave the outcome of this rank for its launcher; without torchrun a no-op.

    Args:
        outcome: ``done``; ``stopped``, with all steps saved; or ``unsaved``.
    """
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        Path(file).with_name(OUTCOME_FILE).write_text(outcome)


class StopRequest:
    """The request to stop that a signal makes; the process then has a limited time.

    Schedulers announce a preemption by SIGTERM, and torchrun passes it on. A thread notices the
    signal even where the main thread waits in a collective for a rank that is gone. Before the
    first step there is nothing to save, so the thread ends the process at once: torchrun signals
    the compiler's processes too, and a compilation without them might never end. After it, the
    thread ends the process when its time is over.

    Attributes:
        grace: Seconds from the signal to the end of the process.
        has_trained: Whether this process made a step.
    """

    def __init__(self) -> None:
        self.grace = 0.0
        self.has_trained = False
        self._is_made = threading.Event()

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
                if not self.has_trained and not is_over.is_set():
                    leave_outcome("stopped")
                    os.write(2, b"stopped before the first step: there is nothing to save\n")
                    os._exit(STOPPED)
                if not is_over.wait(self.grace):
                    os._exit(128 + received[0])
                return


_requests: list[StopRequest] = []


@contextlib.contextmanager
def stop_request() -> Iterator[StopRequest]:
    """The stop request of this process; an inner context has that of the outer one."""
    if _requests:
        yield _requests[0]
        return
    request = StopRequest()
    _requests.append(request)
    try:
        with request.listening():
            yield request
    finally:
        _requests.clear()
