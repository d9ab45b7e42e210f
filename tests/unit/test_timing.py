"""The stopwatch keeps the last run of each part."""

from __future__ import annotations

from unittest import mock

import torch

from amo_dist.timing import Stopwatch


def test_the_last_run_counts() -> None:
    stopwatch = Stopwatch()
    assert stopwatch.seconds("step") == 0.0
    with mock.patch("time.perf_counter", side_effect=[1.0, 3.0, 10.0, 10.5]):
        for expected in (2.0, 0.5):
            with stopwatch.measure("step", torch.device("cpu")):
                pass
            assert stopwatch.seconds("step") == expected
    stopwatch.put("observe", 7.0)
    assert stopwatch.seconds("observe") == 7.0
    assert stopwatch.seconds("step") == 0.5
