"""The harness itself: a harness that hides a failure makes every distributed test worthless."""

from __future__ import annotations

import os
import re
import signal
import time
import warnings
from collections.abc import Callable

import pytest
import torch.distributed as dist

from tests.distributed import harness
from tests.distributed.harness import Ranks


def process_id(rank: int, world_size: int) -> int:
    return os.getpid()


def fail(rank: int, world_size: int) -> None:
    if rank == 1:
        raise KeyError("first")
    dist.barrier()


def warn(rank: int, world_size: int) -> None:
    warnings.warn("a warning", UserWarning, stacklevel=1)


def hang(rank: int, world_size: int) -> None:
    if rank == 0:
        time.sleep(3600)


def kill_last(rank: int, world_size: int) -> str:
    if rank == world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "survived"


@pytest.mark.parametrize(
    ("case", "error", "text"),
    [
        (fail, KeyError, "on rank 1:.*in fail"),
        (warn, UserWarning, "in warn"),
        (kill_last, RuntimeError, "rank 1 ended with exit code -9"),
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
    if case is hang:
        monkeypatch.setattr(harness, "CASE_TIMEOUT", 2.0)
    with pytest.raises(error) as caught:
        run_on(2)(case)
    assert re.search(text, f"{caught.value} {caught.value.__cause__}", re.DOTALL)
    monkeypatch.undo()
    assert not set(before) & set(run_on(2)(process_id))


def test_a_fresh_case_may_lose_ranks_and_spares_the_shared_ones(run_on: Ranks) -> None:
    before = run_on(2)(process_id)
    assert run_on(2, fresh=True)(kill_last) == ["survived", None]
    assert run_on(2)(process_id) == before
