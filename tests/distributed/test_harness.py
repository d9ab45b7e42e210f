"""The harness itself: a harness that hides a failure makes every distributed test worthless."""

from __future__ import annotations

import os
import signal
import time
import warnings

import coverage
import pytest
import torch
import torch.distributed as dist

from tests.distributed import harness
from tests.distributed.harness import Died, RankDiedError, Ranks, RankTraceback


def process_id(rank: int, world_size: int) -> int:
    return os.getpid()


def is_measured(rank: int = 0, world_size: int = 1) -> bool:
    return coverage.Coverage.current() is not None


def fail_on(rank: int, world_size: int, failing: int) -> int:
    if rank == failing:
        raise ValueError(f"ranks: found {rank}, expected another")
    return rank


def fail_while_others_wait(rank: int, world_size: int) -> None:
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


def test_an_exception_arrives_with_its_rank_and_costs_the_pool(run_on: Ranks) -> None:
    before = run_on(2)(process_id)
    with pytest.raises(ValueError, match="found 1, expected another") as caught:
        run_on(2)(fail_on, 1)
    cause = caught.value.__cause__
    assert isinstance(cause, RankTraceback)
    assert cause.rank == 1
    assert "in fail_on" in str(cause)
    assert not set(before) & set(run_on(2)(process_id))


def test_the_first_failure_is_raised_not_that_of_its_victims(run_on: Ranks) -> None:
    with pytest.raises(KeyError, match="first") as caught:
        run_on(3, fresh=True)(fail_while_others_wait)
    assert isinstance(caught.value.__cause__, RankTraceback)
    assert caught.value.__cause__.rank == 1


def test_warnings_on_ranks_are_errors(run_on: Ranks) -> None:
    with pytest.raises(UserWarning, match="a warning"):
        run_on(1, fresh=True)(warn)


@pytest.mark.slow
def test_a_hang_fails_names_the_rank_and_shows_where(run_on: Ranks) -> None:
    before = run_on(2)(process_id)
    with pytest.raises(TimeoutError, match=r"hang: no answer .* from ranks \[0\] of 2") as caught:
        run_on(2, timeout=2.0)(hang)
    assert "in hang" in str(caught.value)
    for pid in before:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert len(run_on(2)(process_id)) == 2


@pytest.mark.slow
def test_a_collective_left_under_way_fails_its_own_case(
    run_on: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "SETTLE_TIMEOUT", 2.0)
    # Gloo either waits for ever or notices that two different collectives met.
    with pytest.raises((TimeoutError, RuntimeError)) as caught:
        run_on(2, fresh=True)(enter_alone)
    assert "_meet_after_the_case" in f"{caught.value} {caught.value.__cause__}"


def test_a_rank_that_ends_is_an_error_naming_it(run_on: Ranks) -> None:
    before = run_on(2)(process_id)
    with pytest.raises(RankDiedError, match="rank 1 ended with exit code -9"):
        run_on(2)(kill_last)
    assert not set(before) & set(run_on(2)(process_id))


def test_a_fresh_case_may_lose_ranks_and_spares_the_shared_pool(run_on: Ranks) -> None:
    before = run_on(2)(process_id)
    assert run_on(2, fresh=True)(kill_last) == ["survived", Died(-signal.SIGKILL)]
    assert run_on(2)(process_id) == before
