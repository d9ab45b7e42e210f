"""Seconds that an optimizer's steps take, on the device and without waiting for it."""

from __future__ import annotations

import collections
import time

import torch


class StepClock:
    """Adds up the seconds from :meth:`start` to :meth:`stop`, which are hooks of ``step()``.

    On CUDA events are recorded around each step, and looked at once they have passed: launching the
    kernels takes a fraction of the time that they run.

    Args:
        device: Where the parameters are.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_on_cuda = device.type == "cuda"
        self._started = 0.0
        self._begun: torch.cuda.Event | None = None
        self._pairs: collections.deque[tuple[torch.cuda.Event, torch.cuda.Event]] = (
            collections.deque()
        )
        self._seconds = 0.0

    def start(self, *_: object) -> None:
        """Begin a step."""
        if self._is_on_cuda:
            self._begun = torch.cuda.Event(enable_timing=True)
            self._begun.record()
        self._started = time.perf_counter()

    def stop(self, *_: object) -> None:
        """End the step."""
        if self._begun is None:
            self._seconds += time.perf_counter() - self._started
            return
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        self._pairs.append((self._begun, end))
        while self._pairs and self._pairs[0][1].query():  # asks, and does not wait
            self._add_first()

    def take(self) -> float:
        """Seconds of all steps since the last call; on CUDA this waits for the end of the last."""
        if self._pairs:
            self._pairs[-1][1].synchronize()
        while self._pairs:
            self._add_first()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _add_first(self) -> None:
        begin, end = self._pairs.popleft()
        self._seconds += begin.elapsed_time(end) / 1e3
