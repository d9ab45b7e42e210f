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
    """Measures the last run of each named part.

    On CUDA a part is bracketed by events, which are read, and waited for, only in `seconds`.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._events: dict[str, tuple[torch.cuda.Event, torch.cuda.Event]] = {}

    @contextlib.contextmanager
    def measure(self, name: str, device: torch.device) -> Iterator[None]:
        """Measure the body, replacing what was measured under this name before."""
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self._events[name] = (begin, end)
            return
        start = time.perf_counter()
        yield
        self._seconds[name] = time.perf_counter() - start

    def put(self, name: str, seconds: float) -> None:
        """Set a part that was measured elsewhere."""
        self._seconds[name] = seconds

    def seconds(self, name: str) -> float:
        """Seconds of the last run of a part; 0 before the first."""
        if name in self._events:
            begin, end = self._events.pop(name)
            end.synchronize()
            self._seconds[name] = begin.elapsed_time(end) / 1e3
        return self._seconds.get(name, 0.0)
