"""What fails on one rank alone is raised on all: nobody is left waiting."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
from collections.abc import Sequence
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
from tests.distributed.harness import Ranks, raised
from tests.distributed.test_ballot import held, is_unchanged, on, spoil

LOGGER = logging.getLogger("amo_dist.engine.ballot")


def out_of_memory(*_: object, **__: object) -> None:
    """Fail anew: an error that is kept would keep the tensors of its frames for later tests."""
    raise torch.OutOfMemoryError("CUDA out of memory")


def full(failure: Failure, is_full: bool) -> contextlib.AbstractContextManager[object]:
    """There is no memory left for a function."""
    if not is_full:
        return contextlib.nullcontext()
    return mock.patch.object(failure.target, failure.name, **failure.options)


def take(model: nn.Module, optimizer: Muon, step: int) -> str:
    models.set_gradients(model, 3, step)
    return raised(optimizer.step)


def post_without_memory(
    self: UpdateRule, results: Sequence[Tensor], pieces: Sequence[Piece], allsum: AllSum
) -> Sequence[Tensor]:
    """`post` of a rule that fails after the first of its two sums."""
    allsum([None] * len(pieces))
    out_of_memory()
    return results


@dataclasses.dataclass
class Failure:
    """What has no memory left on the second rank, and when.

    Attributes:
        kind: Optimizer.
        target: Where the function is.
        name: Of the function.
        fails_at: Step; the next one raises on all ranks.
        fields: Of the config.
        options: Of the patch.
    """

    kind: type[Muon]
    target: Any
    name: str
    fails_at: int = 3
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(
        default_factory=lambda: {"side_effect": out_of_memory}
    )


FAILURES = {
    "updating momentum": Failure(NorMuon, one_step, "advance"),
    "AdamW": Failure(NorMuon, one_step, "adamw"),
    "updating matrices": Failure(Muon, one_step, "apply_update"),
    "finishing updates": Failure(
        NorMuon, NorMuonRule, "post", options={"new": post_without_memory}
    ),
    "orthogonalizing layers.": Failure(Muon, one_step, "orthogonalize"),
    "measuring layers.": Failure(AMO, observe, "spectrum", 2, {"sample_size": 9}),
    "measuring layers. ": Failure(*(AMO, one_step, "ns_residual"), fields={"ns_guard_every": 3}),
}
"""By what the error names."""


def fail(rank: int, world_size: int, what: str, device: str) -> tuple[Any, ...]:
    """Errors by step, steps that changed nothing, and the error of a last failure."""
    failure = FAILURES[what]
    errors, unchanged = {}, set()
    with on(device) as simulated, mock.patch.object(LOGGER, "disabled", True):
        fields = {"bucket_bytes": 256, "ns_guard_every": 0, **failure.fields}
        model, optimizer = runs.make("fsdp", failure.kind, device=device, **fields)
        for step in range(1, 8):
            before = held(model, optimizer)
            is_full = (rank, step) == (1, failure.fails_at)
            models.set_gradients(model, 3, step)
            if simulated is not None:
                simulated.clear()
            with full(failure, is_full):
                if error := raised(optimizer.step):
                    errors[step] = error
            # The failure itself may read; what follows of it does not.
            if simulated is not None and step in (3, 4) and not is_full:
                assert not simulated.waits
            if is_unchanged(before):
                unchanged.add(step)
        assert optimizer.num_steps_taken == (6 if simulated is None else 5)
        assert optimizer.phase in ("uniform", "transition")
        assert all(tensor.isfinite().all() for tensor, _ in held(model, optimizer))
        with full(failure, rank == 1):
            assert take(model, optimizer, 7) == ""
        return errors, unchanged, raised(optimizer.check_last_update)


@pytest.mark.parametrize(
    ("what", "device"),
    [*((what, "cpu") for what in FAILURES), ("orthogonalizing layers.", "cuda")],
)
def test_whatever_fails_on_one_rank_is_raised_on_all(run_on: Ranks, what: str, device: str) -> None:
    """On a device the step after the failure changes nothing, and the next one raises."""
    failure, late = FAILURES[what], device == "cuda"
    (errors, unchanged, last), other = run_on(2)(fail, what, device)
    assert other == (errors, unchanged, last)
    raised_at = failure.fails_at + 1
    assert errors.keys() == {raised_at + late}
    assert unchanged == {raised_at, raised_at + late}
    (error,) = errors.values()
    assert error.startswith(f"RuntimeError: step {failure.fails_at}: {what.strip()}")
    assert " failed on rank 1 in " in error
    assert error.endswith(": OutOfMemoryError: CUDA out of memory")
    # These are called in every step.
    assert last.startswith("RuntimeError: step ") == (not what.startswith("measuring"))


def test_a_single_process_raises_at_once_and_undoes_no_good_step() -> None:
    model, optimizer = runs.make("plain", Muon)
    assert take(model, optimizer, 1) == ""
    with full(FAILURES["orthogonalizing layers."], True):
        assert take(model, optimizer, 2) == "OutOfMemoryError: CUDA out of memory"
    assert optimizer.control_state_dict()["steps_taken"] == optimizer.num_steps_taken == 1


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


def fail_in_a_bad_step(rank: int, world_size: int) -> list[str]:
    """Errors of five steps on a device; in the third a gradient is NaN and a product fails, too."""
    errors = []
    with on("cuda"), mock.patch.object(LOGGER, "disabled", True):
        model, optimizer = runs.make("fsdp", Muon, device="cuda", ns_guard_every=0)
        for step in range(1, 6):
            models.set_gradients(model, 3, step)
            if step == 3 and rank == 0:
                spoil(runs.WQ, torch.nan)(model, optimizer)
            with full(FAILURES["orthogonalizing layers."], (rank, step) == (1, 3)):
                errors.append(raised(optimizer.step))
        errors.append(raised(optimizer.check_last_update))
    return errors


def test_a_failure_in_a_step_that_changed_nothing_has_no_error_of_its_own(run_on: Ranks) -> None:
    first, second = run_on(2)(fail_in_a_bad_step)
    assert first == second
    assert [bool(error) for error in first] == [False, False, False, True, False, False]
    assert first[3].startswith("NonFiniteGradientError")
