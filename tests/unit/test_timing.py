"""The stopwatch keeps the last run."""

from __future__ import annotations

from unittest import mock

import torch

from amo_dist.optimizers.muon import _Stopwatch as Stopwatch


def test_the_last_run_counts() -> None:
    stopwatch = Stopwatch()
    assert stopwatch.seconds() == 0.0
    with mock.patch("time.perf_counter", side_effect=[1.0, 3.0, 10.0, 10.5]):
        for expected in (2.0, 0.5):
            with stopwatch.measure(torch.device("cpu")):
                pass
            assert stopwatch.seconds() == expected
