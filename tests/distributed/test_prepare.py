"""Whatever fails on one rank before the vote is raised on all, and leaves nobody waiting.

The table of failures is made from the code: each function of the package that a rank enters on its
way to the vote, and each call that these functions make, raises in turn on the last rank.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import nn

import amo_dist
from amo_dist import AMO, Muon, NorMuon
from tests import runs
from tests.distributed import models
from tests.distributed.harness import Ranks, raised
from tests.distributed.test_ballot import held, is_unchanged, on

PACKAGE = str(Path(amo_dist.__file__).parent)
NAMED = r"RuntimeError: (step \d+|the first step) failed on rank \d in \S+ \(.*\): OutOfMemory"
"""Error of all ranks: step, rank, function, file and line."""
NO_WORK = {"Muon.step", "Muon._step", "Muon._settle"}
"""Functions that only call others: a line of theirs that works belongs into `prepare`."""

Call = tuple[str, str]
"""Function of the package, and the name of what it calls; empty for the function itself."""


def name_of(code: CodeType) -> str:
    return getattr(code, "co_qualname", code.co_name)


def call_at(frame: FrameType, event: str, argument: Any) -> Call | None:
    """The call that a profiler is told of, if it is one of the package."""
    if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
        return name_of(frame.f_code), ""
    caller = frame.f_back if event == "call" else frame
    if event not in ("call", "c_call") or caller is None:
        return None
    if not caller.f_code.co_filename.startswith(PACKAGE):
        return None
    callee = name_of(frame.f_code) if event == "call" else argument.__qualname__
    return name_of(caller.f_code), callee


@contextlib.contextmanager
def profiled(profiler: Any) -> Iterator[None]:
    before = sys.getprofile()
    sys.setprofile(profiler)
    try:
        yield
    finally:
        sys.setprofile(before)


def calls_before_vote(optimizer: Muon) -> list[Call]:
    """The calls of a step up to its vote, each once, in their order."""
    calls: dict[Call, None] = {}
    is_over = is_on = False

    def profiler(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal is_over, is_on
        name = name_of(frame.f_code)
        is_over |= name == "Engine.vote"
        # What ranks agree on in the first step, and the last verdict, are alike on all of them.
        is_on |= name == "Muon._adopt_swapped_parameters" and optimizer._engine.is_connected
        call = call_at(frame, event, argument)
        if call is not None and is_on and not is_over and call[0] not in NO_WORK:
            calls[call] = None

    with profiled(profiler):
        optimizer.step()
    return [*calls]


def failing(target: Call) -> contextlib.AbstractContextManager[None]:
    """The first such call raises."""
    is_over = False

    def profiler(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal is_over
        is_over |= name_of(frame.f_code) == "Engine.vote"
        if not is_over and call_at(frame, event, argument) == target:
            is_over = True
            raise torch.OutOfMemoryError(f"no memory for {target}")

    return profiled(profiler)


def forget(optimizer: Muon) -> None:
    """Forget what is kept from step to step, or a second try would not call it again."""
    optimizer._decision = None
    if optimizer._engine.is_connected:
        optimizer._engine.ballots._sent_bounds = [], torch.empty(0)


def make(layout: str, device: str, kind: type[Muon]) -> tuple[nn.Module, Muon]:
    return runs.make(layout, kind, device=device, bucket_bytes=256, ns_guard_every=0)


def record(
    rank: int, world_size: int, layout: str, device: str, kind: type[Muon], num_steps: int
) -> tuple[list[list[Call]], dict[str, torch.Tensor]]:
    """The calls of each step on this rank, and the weights after the last."""
    with on(device):
        model, optimizer = make(layout, device, kind)
        calls = []
        for step in range(1, num_steps + 1):
            models.set_gradients(model, 3, step)
            forget(optimizer)
            calls.append(calls_before_vote(optimizer))
        return calls, {name: weight.cpu() for name, weight in runs.weights(model).items()}


def fail_everywhere(
    rank: int,
    world_size: int,
    layout: str,
    device: str,
    kind: type[Muon],
    calls_by_step: list[list[Call]],
) -> tuple[list[str], dict[str, torch.Tensor]]:
    """What is wrong after each failure, and the weights in the end."""
    wrong = list[str]()
    with on(device):
        model, optimizer = make(layout, device, kind)
        for step, calls in enumerate(calls_by_step, start=1):
            models.set_gradients(model, 3, step)
            for call in calls:
                is_here = rank == world_size - 1
                for text in try_call(call if is_here else None, model, optimizer, device):
                    wrong.append(f"{call} in step {step}: {text}")
            optimizer.step()
        optimizer.check_last_update()
        return wrong, {name: weight.cpu() for name, weight in runs.weights(model).items()}


def try_call(call: Call | None, model: nn.Module, optimizer: Muon, device: str) -> list[str]:
    """Have a call fail, or none on this rank; what is wrong with what follows."""
    before, taken = held(model, optimizer), optimizer.num_steps_taken
    forget(optimizer)
    with failing(call) if call else contextlib.nullcontext():
        error = raised(optimizer.step)
    if not error and device == "cuda":  # the next step reads it
        error = raised(optimizer.step)
    wrong = []
    if not re.match(NAMED, error) or (call is not None and str(call) not in error):
        wrong.append(f"found {error or 'no error'!r}")
    if not is_unchanged(before) or optimizer.num_steps_taken != taken:
        wrong.append("something has changed")
    return wrong


@pytest.mark.parametrize(
    ("layout", "kind", "device", "steps", "every"),
    [
        ("fsdp", AMO, "cpu", {4, 8}, 3),
        ("fsdp", AMO, "cuda", {8}, 5),
        ("hsdp", NorMuon, "cpu", {1, 3}, 1),
        *(
            pytest.param(layout, kind, device, steps, 1, marks=pytest.mark.slow)
            for layout, kind, steps in (("fsdp", AMO, {1, 2, 4, 7, 8}), ("hsdp", NorMuon, {1, 3}))
            for device in ("cpu", "cuda")
        ),
    ],
)
def test_what_fails_before_the_vote_is_raised_on_all(
    run_on: Ranks, layout: str, kind: type[Muon], device: str, steps: set[int], every: int
) -> None:
    """AMO observes in step 2, plans in 4, has new owners in 7 and is locked in 8.

    Args:
        run_on: Ranks.
        layout: Layout of the parameters.
        kind: Optimizer.
        device: Kind of device.
        steps: Steps in which failures are tried.
        every: Try one of so many calls inside a function; the functions themselves all are.
    """
    ranks = run_on(4 if layout == "hsdp" else 2)
    *_, (calls, expected) = ranks(record, layout, device, kind, max(steps))
    assert all(len(calls[step - 1]) > 100 for step in steps)
    calls = [
        [call for number, call in enumerate(own) if not call[1] or number % every == 0]
        if step in steps
        else []
        for step, own in enumerate(calls, start=1)
    ]
    for wrong, weights in ranks(fail_everywhere, layout, device, kind, calls):
        assert not wrong, "\n".join(wrong)
        assert runs.equal(weights, expected)
