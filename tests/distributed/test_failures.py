"""What fails on one rank alone is raised on all: nobody is left waiting."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from amo_dist import AMO, Muon, NorMuon
from amo_dist.engine import observe
from amo_dist.engine import step as one_step
from amo_dist.engine.parameters import Piece
from amo_dist.engine.rule import AllSum, UpdateRule
from amo_dist.optimizers.normuon import NorMuonRule
from tests import runs
from tests.distributed import models
from tests.distributed.harness import Ranks
from tests.distributed.test_ballot import held, is_unchanged, on
from tests.distributed.test_ranks import raised

FULL = torch.OutOfMemoryError("CUDA out of memory")


@contextlib.contextmanager
def full(target: Any, name: str, is_full: bool, **options: Any) -> Iterator[None]:
    """There is no memory left for a function, which is not logged."""
    broken = mock.patch.object(target, name, **(options or {"side_effect": FULL}))
    logger = logging.getLogger("amo_dist.engine.ballot")
    with broken if is_full else contextlib.nullcontext():
        logger.disabled = True
        try:
            yield
        finally:
            logger.disabled = False


def take(model: nn.Module, optimizer: Muon, step: int) -> str:
    models.set_gradients(model, 3, step)
    return raised(optimizer.step)


# ------------------------------------------------------------------ measurements


def fail_to_measure(rank: int, world_size: int, name: str, failed: int, owner: int) -> list[str]:
    """The error of each call of ``step``; ``name`` has no memory on one rank."""
    model, optimizer = runs.make("fsdp", AMO, sample_size=9, ns_guard_every=3)
    module, errors = observe if name == "spectrum" else one_step, []
    for number in range(1, 8):
        with full(module, name, (rank, number) == (owner, failed)):
            errors.append(take(model, optimizer, number))
    assert optimizer.num_steps_taken == 6, errors
    assert optimizer.control_state_dict()["source"]["plan"] is not None
    return errors


@pytest.mark.parametrize(("name", "failed", "owner"), [("spectrum", 2, 1), ("ns_residual", 3, 0)])
def test_a_measurement_that_fails_on_its_owner_is_raised_on_all(
    run_on: Ranks, name: str, failed: int, owner: int
) -> None:
    errors, *others = run_on(3)(fail_to_measure, name, failed, owner)
    assert others == [errors] * 2
    assert [number for number, error in enumerate(errors) if error] == [failed]
    assert errors[failed].startswith(f"RuntimeError: step {failed}: measuring layers.")
    end = f"failed on rank {owner}: OutOfMemoryError: CUDA out of memory"
    assert errors[failed].endswith(end)


# ------------------------------------------------------------------ Newton-Schulz


def fail_to_orthogonalize(rank: int, world_size: int, device: str) -> list[tuple[str, bool]]:
    """Error of each step, and whether it changed nothing; the third fails on the second rank."""
    results = []
    with on(device) as simulated:
        model, optimizer = runs.make("fsdp", Muon, device=device, bucket_bytes=256)
        for step in range(1, 7):
            before, is_full = held(model, optimizer), (rank, step) == (1, 3)
            models.set_gradients(model, 3, step)
            if simulated is not None:
                simulated.clear()
            with full(one_step, "orthogonalize", is_full):
                error = raised(optimizer.step)
            # The failure itself may read; what follows of it does not.
            if simulated is not None and step in (3, 4) and not is_full:
                assert not simulated.waits
            results.append((error, is_unchanged(before)))
        with full(one_step, "orthogonalize", rank == 1):
            assert take(model, optimizer, 7) == ""
        results.append((raised(optimizer.check_last_update), False))
    return results


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_newton_schulz_that_fails_on_its_owner_is_raised_on_all(run_on: Ranks, device: str) -> None:
    """On a device the step after the failure changes nothing, and the next one raises."""
    results, other = run_on(2)(fail_to_orthogonalize, device)
    assert results == other
    *steps, last = results
    failed = 4 if device == "cpu" else 5
    assert [step for step, (error, _) in enumerate(steps, 1) if error] == [failed]
    unchanged = {4} if device == "cpu" else {4, 5}
    assert {step for step, (_, is_same) in enumerate(steps, 1) if is_same} == unchanged
    assert steps[failed - 1][0].startswith("RuntimeError: step 3: orthogonalizing layers.")
    assert steps[failed - 1][0].endswith("on rank 1: OutOfMemoryError: CUDA out of memory")
    assert last[0].startswith("RuntimeError: step ")


def test_a_single_process_raises_at_once_and_undoes_no_good_step() -> None:
    model, optimizer = runs.make("plain", Muon)
    assert take(model, optimizer, 1) == ""
    with full(one_step, "orthogonalize", True):
        assert take(model, optimizer, 2) == "OutOfMemoryError: CUDA out of memory"
    assert optimizer.control_state_dict()["steps_taken"] == optimizer.num_steps_taken == 1


# ------------------------------------------------------------------ the rest of a step


def post_without_memory(
    self: UpdateRule, results: Sequence[Tensor], pieces: Sequence[Piece], allsum: AllSum
) -> Sequence[Tensor]:
    """`post` of a rule that fails after the first of its two sums."""
    allsum([None] * len(pieces))
    raise FULL


FAILING: dict[str, tuple[type[Muon], Any, str, Any]] = {
    "updating momentum": (NorMuon, one_step, "update_momentum", FULL),
    "reading momentum": (NorMuon, one_step, "nesterov", FULL),
    "AdamW": (NorMuon, one_step, "adamw", FULL),
    "updating matrices": (Muon, one_step, "apply_update", FULL),
    "finishing updates": (NorMuon, NorMuonRule, "post", post_without_memory),
}
"""Optimizer, function and failure by what the error names."""


def fail_in_a_step(rank: int, world_size: int, part: str) -> list[str]:
    kind, target, name, failure = FAILING[part]
    model, optimizer = runs.make("fsdp", kind, bucket_bytes=256)
    errors = [take(model, optimizer, 1)]
    patch = {"side_effect": failure} if failure is FULL else {"new": failure}
    with full(target, name, rank == 1, **patch):
        errors.append(take(model, optimizer, 2))
    errors += [take(model, optimizer, 3), take(model, optimizer, 3)]
    assert optimizer.num_steps_taken == 3
    assert all(tensor.isfinite().all() for tensor, _ in held(model, optimizer))
    return errors


@pytest.mark.parametrize("part", FAILING)
def test_whatever_fails_in_a_step_is_raised_on_all(run_on: Ranks, part: str) -> None:
    error = f"RuntimeError: step 2: {part} failed on rank 1: OutOfMemoryError: CUDA out of memory"
    assert run_on(2)(fail_in_a_step, part) == [["", "", error, ""]] * 2


def fail_to_plan(rank: int, world_size: int) -> tuple[str, bool, str]:
    model, optimizer = runs.make("fsdp", Muon, ns_guard_every=0)
    before = held(model, optimizer)
    with full(one_step, "make_buckets", rank == 1):
        failed = take(model, optimizer, 1)
    return failed, is_unchanged(before), take(model, optimizer, 1)


def test_an_exchange_that_fails_on_one_rank_changes_nothing(run_on: Ranks) -> None:
    error = "step 1: allocating buffers failed on rank 1: OutOfMemoryError: CUDA out of memory"
    assert run_on(2)(fail_to_plan) == [(f"RuntimeError: {error}", True, "")] * 2


# ------------------------------------------------------------------ loads


def load(rank: int, world_size: int, steps: int) -> tuple[list[str], bool, str, int]:
    """The last rank's state is bad; then the last alone loads; then all load a good one."""
    (trained, first), (model, optimizer) = (runs.make("fsdp", Muon) for _ in range(2))
    runs.train(trained, first, 1, 2)
    runs.train(model, optimizer, 1, steps)
    good, is_last = first.state_dict(), rank == world_size - 1
    bad = copy.deepcopy(good)
    bad["state"][0]["momentum_buffer"] = torch.zeros(3)
    missing = {key: value for key, value in good.items() if key != "state"}
    before, errors = held(model, optimizer), []
    for state in (bad, missing):
        loaded = state if is_last else good
        errors.append(raised(functools.partial(optimizer.load_state_dict, loaded)))
    models.set_gradients(model, 1, 3)
    errors.append(raised(lambda: optimizer.load_state_dict(good) if is_last else optimizer.step()))
    unchanged = is_unchanged(before)
    optimizer.load_state_dict(good)
    return errors, unchanged, take(model, optimizer, 3), optimizer.num_steps_taken


@pytest.mark.parametrize("steps", [0, 2])
def test_a_load_that_fails_on_one_rank_is_raised_on_all(run_on: Ranks, steps: int) -> None:
    result, *others = run_on(3)(load, steps)
    assert others == [result] * 2
    (shape, missing, alone), *rest = result
    loaded = "ValueError: load_state_dict failed on rank 2: ValueError: state"
    assert shape.startswith(loaded)
    assert ".momentum_buffer: found shape (3,), expected " in shape
    assert missing == f"{loaded}: found NoneType, expected a mapping"
    assert alone.startswith("RankMismatchError: ")
    assert "rank 2 has load_state_dict" in alone
    assert rest == [True, "", 3]
