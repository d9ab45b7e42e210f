"""Measures spectra of sampled matrices: at once, or on a thread while training goes on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from amo_dist.distributed.spans import span
from amo_dist.kernels.spectra import observe
from amo_dist.schedule.types import Schedule


class Observer:
    """The local linear algebra of observation; it never communicates.

    In the background each matrix is cloned, one thread measures them one by one, on a CUDA device
    on a stream of its own, and `collect` waits for it. The values are the same bits either way.

    Args:
        in_background: Whether `measure` returns before its value is known.
        trials: Schedules whose errors are measured, all with the same scale of their input.
    """

    def __init__(self, *, in_background: bool, trials: Sequence[Schedule] = ()) -> None:
        self.in_background = in_background
        self.num_values = 1 + 2 * len(trials)
        """What a measurement gives."""
        self._coefficients, self._norm_scale = trial_tensor(trials)
        self._seconds = 0.0
        self._values: dict[str, Tensor | Future[Tensor]] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def measure(self, name: str, matrix: Tensor, result: Tensor | None = None) -> None:
        """Begin to measure a matrix.

        Args:
            name: Of the matrix.
            matrix: ``(m, n)``, float32 or float64; may be overwritten after this returns.
            result: Not looked at.
        """
        start = time.perf_counter()
        with span("amo::observe"):
            take = self._submit if self.in_background else self._observe
            self._values[name] = take(matrix)
        self._seconds += time.perf_counter() - start

    def collect(self) -> dict[str, Tensor]:
        """What `observe` gives of each matrix measured since the last time, by name.

        Raises:
            Exception: Whatever a measurement raised on the thread; all are forgotten then.
        """
        start = time.perf_counter()
        # A failure must not come up again with the next observation.
        values, self._values = self._values, {}
        with span("amo::observe"):
            found = {
                name: value.result() if isinstance(value, Future) else value
                for name, value in values.items()
            }
        self._seconds += time.perf_counter() - start
        return found

    def reset_seconds(self) -> float:
        """Seconds that the caller's thread has spent here since the last time."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def discard(self) -> None:
        """Forget what has been measured, and what is under way; waits for nothing."""
        for value in self._values.values():
            if isinstance(value, Future):
                value.cancel()
        self._values = {}

    def _submit(self, matrix: Tensor) -> Future[Tensor]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="amo-observe")
        ready, sample = None, matrix.clone()
        if sample.device.type == "cuda":
            ready = torch.cuda.current_stream(sample.device).record_event()
        return self._thread.submit(self._measure, sample, ready)

    def _measure(self, sample: Tensor, ready: torch.cuda.Event | None) -> Tensor:
        """On the thread."""
        with torch.no_grad(), contextlib.ExitStack() as stack:
            if ready is not None:
                # A new thread is on device 0. Left there, it would make a context on it, hundreds
                # of MiB for each rank of the node, when it leaves the stream below.
                torch.cuda.set_device(sample.device)
                stream = self._streams.get(sample.device)
                if stream is None:
                    stream = self._streams[sample.device] = torch.cuda.Stream(sample.device)
                stack.enter_context(torch.cuda.stream(stream))
                stream.wait_event(ready)
                # Else its memory could be given away while this stream still reads it.
                sample.record_stream(stream)
            found = self._observe(sample)
            return found.cpu() if ready is not None else found

    def _observe(self, matrix: Tensor) -> Tensor:
        return observe(matrix, self._coefficients, self._norm_scale)


def trial_tensor(trials: Sequence[Schedule]) -> tuple[Tensor, float]:
    """Schedules as `observe` takes them.

    Returns:
        Coefficients, float64 on the CPU, ``(trials, steps, 3)``, and the scale of their input.
    """
    most = max((schedule.num_steps for schedule in trials), default=0)
    stay = (1.0, 0.0, 0.0)
    rows = [[*one.coefficients, *[stay] * (most - one.num_steps)] for one in trials]
    coefficients = torch.tensor(rows, dtype=torch.float64, device="cpu").view(len(rows), most, 3)
    (scale,) = {schedule.norm_scale for schedule in trials} or {1.0}
    return coefficients, scale
