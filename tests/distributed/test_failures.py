"""What fails on one rank alone is raised on all: nobody is left waiting."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from amo_dist import AMO, AMOConfig, Muon, MuonConfig, NorMuon, param_groups
from amo_dist.engine import controller
from amo_dist.engine import step as one_step
from amo_dist.engine.parameters import Piece
from amo_dist.engine.rule import AllSum, UpdateRule
from amo_dist.optimizers.normuon import NorMuonRule
from amo_dist.tools.tracker import GeometryTracker
from tests.distributed import models
from tests.distributed.harness import Ranks
from tests.distributed.test_late_verdict import everything, same_bits
from tests.nccl import nccl
from tests.simulated_device import simulated_device

SEED = 3
FULL = torch.OutOfMemoryError("CUDA out of memory")
FIELDS: dict[str, Any] = {
    "observe_until": 4,
    "observe_every": 2,
    "sample_size": 9,
    "transition_steps": 2,
    "ns_guard_every": 3,
}


@contextlib.contextmanager
def full(target: Any, name: str, is_so: bool, **how: Any) -> Iterator[None]:
    """There is no memory left for a function, and nobody hears of it but by an error."""
    broken = mock.patch.object(target, name, **(how or {"side_effect": FULL}))
    logger = logging.getLogger("amo_dist.engine.ballot")
    with broken if is_so else contextlib.nullcontext():
        logger.disabled = True
        try:
            yield
        finally:
            logger.disabled = False


def told(function: Callable[[], object]) -> str:
    try:
        function()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def take(model: nn.Module, optimizer: Muon, step: int) -> str:
    models.set_gradients(model, SEED, step)
    return told(optimizer.step)


# ------------------------------------------------------------------ measurements


def fail_to_measure(rank: int, world_size: int, what: str) -> tuple[list[str], list[float]]:
    """What each step raised, and how many observations were known after it."""
    model = models.make_model("fsdp", models.shapes())
    optimizer = AMO(param_groups(model), lr=3e-3, config=AMOConfig(**FIELDS))
    if what == "tracker":
        optimizer.tracker = GeometryTracker(2)
    target: Any = {
        "observation": (controller, "observe"),
        "residual": (controller, "ns_residual"),
        "tracker": (GeometryTracker, "measure"),
    }[what]
    found, known = [], []
    for step in range(1, 7):
        # A matrix that is measured alone is each rank's in turn.
        is_full = (rank, step) == ((1, 3) if what == "residual" else (1, 2))
        with full(*target, is_full):
            found.append(take(model, optimizer, step))
        assert optimizer.num_steps_taken == step, found
        known.append(optimizer.metrics()["amo/observations"])
    assert optimizer.control_state_dict()["policy"]["plan"] is not None
    return found, known


@pytest.mark.parametrize("what", ["observation", "residual", "tracker"])
def test_a_measurement_that_fails_on_its_owner_is_raised_on_all(run_on: Ranks, what: str) -> None:
    (found, known), *others = run_on(3, timeout=60.0)(fail_to_measure, what)
    assert others == [(found, known)] * 2
    rank, failed = 1, 3 if what == "residual" else 2
    assert [step for step, text in enumerate(found, 1) if text] == [failed]
    text = found[failed - 1]
    assert text.startswith(f"RuntimeError: step {failed}: measuring layers.")
    assert text.endswith(f"failed on rank {rank}: OutOfMemoryError: CUDA out of memory")
    # What the others measured is kept, and training may go on.
    assert known == [0, 1, 1, 2, 2, 2]


def fail_to_write(rank: int, world_size: int) -> list[str]:
    model = models.make_model("fsdp", models.shapes())
    optimizer = Muon(param_groups(model), lr=3e-3)
    optimizer.tracker = GeometryTracker(1, sink=lambda step, _: 1 // (2 - step))
    return [take(model, optimizer, step) for step in (1, 2, 3)]


def test_measurements_that_the_first_rank_cannot_write_are_an_error_on_all(run_on: Ranks) -> None:
    found, other = run_on(2, timeout=60.0)(fail_to_write)
    assert found == other
    assert found[0] == found[2] == ""
    assert found[1] == (
        "RuntimeError: step 2: collecting measurements failed on rank 0: ZeroDivisionError: "
        "integer division or modulo by zero"
    )


# ------------------------------------------------------------------ Newton-Schulz


def fail_to_orthogonalize(rank: int, world_size: int) -> list[Any]:
    """In the second step, and in the fourth, after which all ask."""
    model = models.make_model("fsdp", models.shapes())
    optimizer = Muon(param_groups(model), lr=1e-2, config=MuonConfig(bucket_bytes=256))
    found: list[Any] = []
    for step in (1, 2, 3, 4):
        before = everything(model, optimizer)
        with full(one_step, "orthogonalize", rank == 1 and step % 2 == 0):
            found.append(take(model, optimizer, step))
        found.append(same_bits(everything(model, optimizer), before))
    found.append(told(optimizer.check_last_update))
    found.append(take(model, optimizer, 5))
    return [*found, optimizer.num_steps_taken]


def test_newton_schulz_that_fails_on_its_owner_is_raised_on_all(run_on: Ranks) -> None:
    found, other = run_on(2, timeout=60.0)(fail_to_orthogonalize)
    assert found == other
    first, _, second, changed, third, unchanged, fourth, _, asked, fifth, steps = found
    assert (first, second, fourth, fifth) == ("", "", "", "")
    assert not changed
    assert unchanged
    assert third.startswith("RuntimeError: step 2: orthogonalizing layers.")
    assert third.endswith("failed on rank 1: OutOfMemoryError: CUDA out of memory")
    assert asked.startswith("RuntimeError: step 3: orthogonalizing layers.")
    assert steps == 4


def fail_on_a_device(rank: int, world_size: int) -> list[Any]:
    found: list[Any] = []
    with simulated_device() as device, nccl():
        model = models.make_model("fsdp", models.shapes(), "cuda")
        config = MuonConfig(bucket_bytes=256)
        optimizer = Muon(param_groups(model), lr=1e-2, config=config)
        for step in (1, 2, 3, 4, 5, 6):
            before = everything(model, optimizer)
            models.set_gradients(model, SEED, step)
            is_full = rank == 1 and step == 3
            # The failure itself may read; what follows of it is told without.
            watched = step in (3, 4) and not is_full
            device.clear()
            with full(one_step, "orthogonalize", is_full):
                found.append(told(optimizer.step))
            assert not (watched and device.waits)
            found.append(same_bits(everything(model, optimizer), before))
    return [*found, optimizer.num_steps_taken]


def test_on_devices_nobody_waits_to_tell(run_on: Ranks) -> None:
    """The step after the failure changes nothing, and the next one raises."""
    found, other = run_on(2, timeout=60.0)(fail_on_a_device)
    assert found == other
    texts, unchanged = found[:-1:2], found[1:-1:2]
    assert unchanged == [False, False, False, True, True, False]
    assert texts[:4] + texts[5:] == [""] * 5
    assert texts[4].startswith("RuntimeError: step 3: orthogonalizing layers.")
    assert texts[4].endswith("failed on rank 1: OutOfMemoryError: CUDA out of memory")
    assert found[-1] == 4


def test_a_single_process_raises_at_once() -> None:
    model = models.make_model("plain", models.shapes())
    optimizer = Muon(param_groups(model))
    with full(one_step, "orthogonalize", True):
        assert take(model, optimizer, 1) == "OutOfMemoryError: CUDA out of memory"


def test_a_step_that_raises_midway_undoes_no_good_step() -> None:
    """A bad verdict on the step that raised once took back the step before it, too."""
    model = models.make_model("plain", models.shapes())
    optimizer = Muon(param_groups(model))
    assert take(model, optimizer, 1) == ""
    with full(one_step, "orthogonalize", True):
        assert take(model, optimizer, 2) != ""
    assert optimizer._controller.control_after("undone").steps_taken == 1


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
    "AdamW": (NorMuon, one_step, "adamw_step", FULL),
    "updating matrices": (Muon, one_step, "apply_update", FULL),
    "finishing updates": (NorMuon, NorMuonRule, "post", post_without_memory),
}
"""Optimizer, function and failure by what the error names."""


def fail_in_a_step(rank: int, world_size: int) -> dict[str, tuple[list[str], float]]:
    """Of each: what four steps raised, and seconds from the failure until it was raised here."""
    found = {}
    for what, (kind, target, name, how) in FAILING.items():
        model = models.make_model("fsdp", models.shapes())
        optimizer = kind(param_groups(model), lr=1e-2, config=MuonConfig(bucket_bytes=256))
        texts = [take(model, optimizer, 1)]
        patch = {"side_effect": how} if how is FULL else {"new": how}
        start = time.perf_counter()
        with full(target, name, rank == 1, **patch):
            texts.append(take(model, optimizer, 2))
        texts.append(take(model, optimizer, 3))
        seconds = time.perf_counter() - start
        texts.append(take(model, optimizer, 3))
        assert optimizer.num_steps_taken == 3
        assert all(torch.isfinite(tensor).all() for tensor in everything(model, optimizer))
        found[what] = texts, seconds
    return found


def test_whatever_fails_in_a_step_is_raised_on_all(run_on: Ranks) -> None:
    ranks = run_on(2, timeout=60.0)(fail_in_a_step)
    for what in FAILING:
        (first, second, third, fourth), _ = ranks[0][what]
        assert (first, second, fourth) == ("", "", ""), what
        error = f"step 2: {what} failed on rank 1: OutOfMemoryError: CUDA out of memory"
        assert third == f"RuntimeError: {error}"
        assert [texts for texts, _ in (found[what] for found in ranks)] == [ranks[0][what][0]] * 2
        print(what, *(f"{found[what][1]:.2f} s" for found in ranks))


def fail_to_plan(rank: int, world_size: int) -> tuple[str, bool, str]:
    model = models.make_model("fsdp", models.shapes())
    optimizer = Muon(param_groups(model), lr=1e-2)
    before = everything(model, optimizer)
    with full(one_step, "make_buckets", rank == 1):
        failed = take(model, optimizer, 1)
    return failed, same_bits(everything(model, optimizer), before), take(model, optimizer, 1)


def test_an_exchange_that_fails_on_one_rank_changes_nothing(run_on: Ranks) -> None:
    error = "step 1: allocating buffers failed on rank 1: OutOfMemoryError: CUDA out of memory"
    expected = f"RuntimeError: {error}", True, ""
    assert run_on(2, timeout=60.0)(fail_to_plan) == [expected] * 2


# ------------------------------------------------------------------ loads


def load(rank: int, world_size: int, when: str) -> list[Any]:
    """The last rank's state is bad; then the last alone loads; then all load a good one."""
    trained, model = (models.make_model("fsdp", models.shapes()) for _ in range(2))
    first, optimizer = (Muon(param_groups(each), lr=1e-2) for each in (trained, model))
    for step in (1, 2):
        take(trained, first, step)
        if when == "later":
            take(model, optimizer, step)
    good, is_last = first.state_dict(), rank == world_size - 1
    bad = copy.deepcopy(good)
    bad["state"][0]["momentum_buffer"] = torch.zeros(3)
    missing = {key: value for key, value in good.items() if key != "state"}
    before, found = everything(model, optimizer), []
    for state in (bad, missing):
        loaded = state if is_last else good
        found.append(told(functools.partial(optimizer.load_state_dict, loaded)))
    models.set_gradients(model, SEED, 3)
    found.append(told(lambda: optimizer.load_state_dict(good) if is_last else optimizer.step()))
    found.append(same_bits(everything(model, optimizer), before))
    optimizer.load_state_dict(good)
    found += [take(model, optimizer, 3), optimizer.num_steps_taken]
    return found


@pytest.mark.parametrize("when", ["first", "later"])
def test_a_load_that_fails_on_one_rank_is_raised_on_all(run_on: Ranks, when: str) -> None:
    found, *others = run_on(3, timeout=60.0)(load, when)
    assert others == [found] * 2
    shape, missing, alone, unchanged, after, steps = found
    loaded = "ValueError: load_state_dict failed on rank 2: ValueError: state"
    assert shape.startswith(loaded)
    assert ".momentum_buffer: found shape (3,), expected " in shape
    assert missing == f"{loaded}: found NoneType, expected a mapping"
    assert alone.startswith("RankMismatchError: ")
    assert "rank 2 has load_state_dict" in alone
    assert (unchanged, after, steps) == (True, "", 3)
