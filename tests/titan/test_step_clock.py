"""The clock of optimizer steps, on a CPU and with the events of a made-up device."""

from __future__ import annotations

import dataclasses
from typing import ClassVar
from unittest import mock

import pytest
import torch

from torchtitan_ext.runs.step_clock import StepClock

DEVICE = torch.device("cuda", 1)


@dataclasses.dataclass
class Event:
    """A CUDA event of a device whose kernels take a second from one event to the next."""

    enable_timing: bool
    passes_at: float = 0.0

    num_recorded: ClassVar[int] = 0
    device_time: ClassVar[float] = 0.0
    """How far the device has got."""
    waits: ClassVar[list[float]] = []

    def record(self, stream: object) -> None:
        assert stream == DEVICE  # the current device may be another one
        Event.num_recorded += 1
        self.passes_at = float(Event.num_recorded)

    def synchronize(self) -> None:
        Event.waits.append(self.passes_at)
        Event.device_time = max(Event.device_time, self.passes_at)

    def elapsed_time(self, end: Event) -> float:
        assert self.enable_timing
        assert end.passes_at <= Event.device_time
        return 1e3 * (end.passes_at - self.passes_at)


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device=None: device)
    Event.num_recorded, Event.device_time, Event.waits = 0, 0.0, []


def test_on_a_cpu_the_seconds_of_steps_add_up() -> None:
    clock = StepClock(torch.device("cpu"))
    with mock.patch("time.perf_counter", side_effect=[1.0, 3.0, 10.0, 10.5]):
        for _ in range(2):
            clock.start()
            clock.stop()
    assert clock.take() == 2.5
    assert clock.take() == 0.0
    assert Event.num_recorded == 0


def test_on_cuda_the_device_is_asked_and_waited_for_once() -> None:
    clock = StepClock(DEVICE)
    for _ in range(5):
        clock.start()
        clock.stop()
    assert Event.waits == []
    assert clock.take() == 5.0
    assert Event.waits == [10.0]
    assert clock.take() == 0.0
