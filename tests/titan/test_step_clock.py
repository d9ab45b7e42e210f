"""The clock of optimizer steps, on a CPU and with the events of a made-up device."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from torchtitan_ext.runs.step_clock import StepClock

DEVICE = torch.device("cuda", 1)


def test_on_a_cpu_the_seconds_of_steps_add_up() -> None:
    clock = StepClock(torch.device("cpu"))
    with mock.patch("time.perf_counter", side_effect=[1.0, 3.0, 10.0, 10.5]):
        for _ in range(2):
            clock.start()
            clock.stop()
    assert clock.take() == 2.5
    assert clock.take() == 0.0


def test_on_cuda_the_device_is_asked_and_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []

    def make_event(enable_timing: bool) -> Any:
        """An event of a device whose kernels take a second from one event to the next."""
        assert enable_timing
        place = len(events)
        seconds_to = lambda end: 1e3 * (events.index(end) - place)  # noqa: E731
        events.append(mock.Mock(elapsed_time=seconds_to))
        return events[-1]

    monkeypatch.setattr("torch.cuda.Event", make_event)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device=None: device)
    clock = StepClock(DEVICE)
    for _ in range(5):
        clock.start()
        clock.stop()
    for event in events:
        event.record.assert_called_once_with(DEVICE)  # the current device may be another one
    assert not any(event.synchronize.called for event in events)
    assert clock.take() == 5.0
    assert [event.synchronize.call_count for event in events] == [0] * 9 + [1]
    assert clock.take() == 0.0
