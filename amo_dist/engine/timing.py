"""Seconds spent in parts of a step, without waiting for the device before they are asked for."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from amo_dist.distributed.agreement import control_device, max_over


def slowest(seconds: float, group: dist.ProcessGroup | None) -> float:
    """The most seconds of any rank of the group, to a nanosecond; a collective over it."""
    nanoseconds = torch.tensor([round(seconds * 1e9)], device=control_device(group))
    return float(max_over(nanoseconds, group).item()) / 1e9


class Stopwatch:
    """Measures the last run of a part of the program.

    On CUDA it is bracketed by events, which are read, and waited for, only in `seconds`.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    @contextlib.contextmanager
    def measure(self, device: torch.device) -> Iterator[None]:
        """Measure the body, replacing what was measured before."""
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self._events = begin, end
            return
        start = time.perf_counter()
        yield
        self._seconds = time.perf_counter() - start

    def seconds(self) -> float:
        """Seconds of the last run; 0 before the first."""
        if self._events is not None:
            begin, end = self._events
            end.synchronize()
            self._events, self._seconds = None, begin.elapsed_time(end) / 1e3
        return self._seconds
