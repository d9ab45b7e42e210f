"""Seconds that an optimizer's steps take, on the device and without waiting for it."""

from __future__ import annotations

import time

import torch


class StepClock:
    """Adds up the seconds from :meth:`start` to :meth:`stop`, which are hooks of ``step()``.

    On CUDA events are recorded around each step, and read when somebody asks: launches return
    early, so host time would be too short.

    Args:
        device: Device of the parameters.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._seconds = 0.0

    def start(self, *_: object) -> None:
        """Begin a step."""
        self._mark(-1.0)

    def stop(self, *_: object) -> None:
        """End the step."""
        self._mark(1.0)

    def take(self) -> float:
        """Seconds of all steps since the last call; on CUDA this waits for the end of the last."""
        if self._events:
            self._events[-1].synchronize()
        pairs = zip(self._events[::2], self._events[1::2], strict=True)
        seconds: float = self._seconds + sum(begin.elapsed_time(end) for begin, end in pairs) / 1e3
        self._events, self._seconds = [], 0.0
        return seconds

    def _mark(self, sign: float) -> None:
        if self._device.type == "cuda":
            self._events.append(torch.cuda.Event(enable_timing=True))
            # The stream of the parameters: without it each rank would use that of device 0.
            self._events[-1].record(torch.cuda.current_stream(self._device))
        else:
            self._seconds += sign * time.perf_counter()
