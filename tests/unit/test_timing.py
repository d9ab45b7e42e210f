"""The stopwatch keeps the last run; the slowest rank tells for all."""

from __future__ import annotations

from unittest import mock

import torch

from amo_dist.distributed.ranks import slowest, world_group
from amo_dist.optimizers.muon import _Stopwatch as Stopwatch
from tests.distributed.harness import Ranks


def test_the_last_run_counts() -> None:
    stopwatch = Stopwatch()
    assert stopwatch.seconds() == 0.0
    with mock.patch("time.perf_counter", side_effect=[1.0, 3.0, 10.0, 10.5]):
        for expected in (2.0, 0.5):
            with stopwatch.measure(torch.device("cpu")):
                pass
            assert stopwatch.seconds() == expected


def slowest_of_all(rank: int, world_size: int) -> float:
    return slowest(0.25 * (rank + 1), world_group())


def test_the_slowest_rank_counts(run_on: Ranks) -> None:
    assert run_on(3)(slowest_of_all) == [0.75] * 3
    assert slowest(0.123456789, None) == 0.123456789
