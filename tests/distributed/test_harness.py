"""The harness itself: a harness that hides a failure makes every distributed test worthless."""

from __future__ import annotations

import os
import re
import signal
import time
import warnings
from collections.abc import Callable

import coverage
import pytest
import torch
import torch.distributed as dist

from tests.distributed import harness
from tests.distributed.harness import Ranks


def process_id(rank: int, world_size: int) -> int:
    return os.getpid()


def is_measured(rank: int = 0, world_size: int = 1) -> bool:
    return coverage.Coverage.current() is not None


def fail(rank: int, world_size: int) -> None:
    if rank == 1:
        raise KeyError("first")
    dist.barrier()


def warn(rank: int, world_size: int) -> None:
    warnings.warn("a warning", UserWarning, stacklevel=1)


def hang(rank: int, world_size: int) -> None:
    if rank == 0:
        time.sleep(3600)


def enter_alone(rank: int, world_size: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(1), async_op=True)


def kill_last(rank: int, world_size: int) -> str:
    if rank == world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "survived"


def test_ranks_are_measured_where_the_tests_are(run_on: Ranks) -> None:
    # Without this, a full run would report low coverage and nobody would know why.
    assert run_on(2)(is_measured) == [is_measured()] * 2


@pytest.mark.parametrize(
    ("case", "error", "text"),
    [
        (fail, KeyError, "on rank 1:.*in fail"),
        (warn, UserWarning, "in warn"),
        (kill_last, RuntimeError, "rank 1 ended with exit code -9"),
        # Gloo either waits for ever or notices that two different collectives met.
        pytest.param(
            *(enter_alone, (TimeoutError, RuntimeError), "_meet_after_the_case"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(hang, TimeoutError, r"hang: no answer .* from ranks \[0\] of 2.*in hang"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_failure_says_where_and_costs_the_ranks(
    run_on: Ranks,
    monkeypatch: pytest.MonkeyPatch,
    case: Callable[..., object],
    error: type[BaseException],
    text: str,
) -> None:
    before = run_on(2)(process_id)
    if case in (hang, enter_alone):
        monkeypatch.setattr(harness, "CASE_TIMEOUT", 2.0)
        monkeypatch.setattr(harness, "SETTLE_TIMEOUT", 2.0)
    with pytest.raises(error) as caught:
        run_on(2)(case)
    assert re.search(text, f"{caught.value} {caught.value.__cause__}", re.DOTALL)
    monkeypatch.undo()
    assert not set(before) & set(run_on(2)(process_id))


def test_a_fresh_case_may_lose_ranks_and_spares_the_shared_ones(run_on: Ranks) -> None:
    before = run_on(2)(process_id)
    assert run_on(2, fresh=True)(kill_last) == ["survived", None]
    assert run_on(2)(process_id) == before
