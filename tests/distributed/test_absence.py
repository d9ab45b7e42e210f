"""Ranks that are stopped or gone are named by those that waited for them."""

from __future__ import annotations

import datetime
import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist

from amo_dist import Muon, param_groups
from amo_dist.distributed import absence, groups
from tests.distributed import models
from tests.distributed.harness import GLOO_TIMEOUT, Died, Ranks

SEED = 3


def lose(rank: int, world_size: int, how: str) -> str:
    """The second rank is lost before its third step."""
    absence.ROLL_CALL_S = 3.0
    # As torchtitan does; its name before PyTorch 2.14.
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(datetime.timedelta(seconds=3), dist.group.WORLD)
    pids: list[int] = [0] * world_size
    dist.all_gather_object(pids, os.getpid())
    model = models.make_model("plain", models.shapes())
    optimizer = Muon(param_groups(model), lr=1e-2, process_group=dist.group.WORLD)
    told = ""
    for step in (1, 2, 3):
        if (rank, step) == (1, 3):
            os.kill(os.getpid(), signal.SIGSTOP if how == "stopped" else signal.SIGKILL)
        models.set_gradients(model, SEED, step)
        try:
            optimizer.step()
        except absence.AbsentRanksError as error:
            told = str(error)
    if rank == 0:
        # Once the others have told: the test waits for this one too.
        threading.Timer(4.0, os.kill, (pids[1], signal.SIGKILL)).start()
    return told


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stopped", "dead"])
def test_a_lost_rank_is_named_with_the_step(run_on: Ranks, how: str) -> None:
    first, lost, third = run_on(3, fresh=True)(lose, how)
    assert lost == Died(-signal.SIGKILL)
    for rank, told in ((0, first), (2, third)):
        start = "step 3 of the optimizer: rank(s) 1 did not answer: stopped, dead or far behind; "
        assert told.startswith(f"{start}a collective of rank {rank} failed for it: [")
        assert "\n" not in told
        assert "Timed out waiting 3000ms" in told or how == "dead"


def timeouts(rank: int, world_size: int) -> set[float]:
    """In seconds, of the groups of an optimizer whose replicas are no group of the job's."""
    membership = groups.Membership([], dist.group.WORLD)
    pairs = [(0, 1)] if rank < 2 else []
    made = [dist.group.WORLD, *membership.groups(pairs, dist.group.WORLD).values()]
    found = [one._get_backend(torch.device("cpu")) for one in made if one is not None]
    return {one.options._timeout.total_seconds() for one in found}


def test_new_groups_wait_as_long_as_that_of_the_job(run_on: Ranks) -> None:
    assert run_on(3)(timeouts) == [{GLOO_TIMEOUT}] * 3


def fail_alike(rank: int, world_size: int) -> str:
    """A collective fails although all ranks are there; then something that is no collective."""
    for text in ("[/gloo/transport] Timed out", "out of memory"):
        try:
            absence.name_absent(RuntimeError(text), "step 1")
        except absence.AbsentRanksError as error:
            return str(error)
    return "nobody is accused"


def fail_without_the_third(rank: int, world_size: int) -> str:
    """A collective of two ranks fails while the third does something else."""
    absence.ROLL_CALL_S = 1.0
    if rank < 2:
        absence.name_absent(RuntimeError("[/gloo/transport] Timed out"), "step 1", (0, 1))
    return "nobody is accused"


def test_ranks_that_take_no_part_are_not_accused(run_on: Ranks) -> None:
    assert run_on(3, fresh=True)(fail_without_the_third) == ["nobody is accused"] * 3


def test_ranks_that_answer_are_not_accused(run_on: Ranks) -> None:
    assert run_on(2, fresh=True)(fail_alike) == ["nobody is accused"] * 2


def fail_twice(rank: int, world_size: int) -> str:
    """All ranks answer once; then the second one is gone, and its old answer does not count."""
    absence.ROLL_CALL_S = 1.0
    absence.name_absent(RuntimeError("[/gloo/transport] Timed out"), "step 1")
    if rank == 1:
        return ""
    try:
        absence.name_absent(RuntimeError("[/gloo/transport] Timed out"), "step 1")
    except absence.AbsentRanksError as error:
        return str(error)
    return "nobody is accused"


def test_an_answer_to_an_earlier_call_does_not_count(run_on: Ranks) -> None:
    first, _ = run_on(2, fresh=True)(fail_twice)
    assert first.startswith("step 1: rank(s) 1 did not answer")
