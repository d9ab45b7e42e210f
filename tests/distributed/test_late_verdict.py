"""On devices the verdict of a step is told by the next one; the step itself changed nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

from amo_dist import (
    AdaMuon,
    MissingGradientError,
    Muon,
    MuonConfig,
    NonFiniteGradientError,
    NonFiniteUpdateError,
    NorMuon,
    RankMismatchError,
    param_groups,
)
from amo_dist.distributed.layout import local_tensor
from tests.distributed import models
from tests.distributed.harness import Ranks
from tests.nccl import nccl
from tests.simulated_device import simulated_device

MATRIX, REST = "layers.1.attention.wq.weight", "tok_embeddings.weight"
SHAPES = {  # few: an operation on the simulated device takes long
    name: shape
    for name, shape in models.shapes().items()
    if name in (MATRIX, REST) or name.startswith("layers.0.attention")
}
OPTIMIZERS: dict[str, type[Muon]] = {"muon": Muon, "adamuon": AdaMuon, "normuon": NorMuon}
WORLDS = [pytest.param("fsdp", 2, id="fsdp-2"), pytest.param("hsdp", 4, id="hsdp-2x2")]


def make(layout: str, optimizer: str = "muon", **fields: Any) -> tuple[nn.Module, Muon]:
    """After two good steps: from the second on nothing waits."""
    model = models.make_model(layout, SHAPES, "cuda")
    config = MuonConfig(bucket_bytes=256, **fields)
    made = OPTIMIZERS[optimizer](param_groups(model), lr=1e-2, config=config)
    for step in (1, 2):
        models.set_gradients(model, 1, step)
        made.step()
    return model, made


def everything(model: nn.Module, optimizer: Muon) -> list[Tensor]:
    """Copies of this rank's part of parameters and state."""
    state = [value for values in optimizer.state.values() for value in values.values()]
    return [local_tensor(tensor).clone() for tensor in [*model.parameters(), *state]]


def same_bits(left: list[Tensor], right: list[Tensor]) -> bool:
    pairs = zip(left, right, strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs if a.dim())


def nan(model: nn.Module, name: str) -> None:
    grad = model.get_parameter(name).grad
    assert grad is not None
    local_tensor(grad).view(-1)[0] = torch.nan


def missing(model: nn.Module, name: str) -> None:
    model.get_parameter(name).grad = None


def foreign(model: nn.Module, name: str) -> None:
    param = model.get_parameter(name)
    param.grad = torch.zeros(param.shape, device="cuda")


FAULTS: dict[str, Callable[[nn.Module, str], None]] = {
    "nan": nan,
    "missing": missing,
    "foreign": foreign,
}
KINDS: dict[str, type[Exception]] = {
    "nan": NonFiniteGradientError,
    "missing": MissingGradientError,
    "foreign": ValueError,
}


def faults(rank: int, world_size: int, layout: str, optimizer: str) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    with simulated_device() as device, nccl():
        for fault, spoil in FAULTS.items():
            for name in (MATRIX, REST):
                model, made = make(layout, optimizer)
                models.set_gradients(model, 1, 3)
                if rank == world_size - 1:
                    spoil(model, name)
                before = everything(model, made)
                # Which gradients exist is copied to the device when that changes.
                device.clear()
                made.step()
                assert fault != "nan" or not device.waits
                unchanged = same_bits(everything(model, made), before)
                models.set_gradients(model, 1, 4)
                with pytest.raises(KINDS[fault]) as raised:
                    made.step()
                late = same_bits(everything(model, made), before)
                steps = made.num_steps_taken
                made.step()  # once told it is over
                moved = not same_bits(everything(model, made), before)
                found.append((name, str(raised.value), unchanged, late, steps, moved))
    return found


@pytest.mark.parametrize(
    ("layout", "world_size", "optimizer"),
    [("fsdp", 2, "muon"), ("hsdp", 4, "adamuon"), ("fsdp", 2, "normuon")],
)
def test_a_bad_step_changes_nothing_and_is_told_by_the_next(
    run_on: Ranks, layout: str, world_size: int, optimizer: str
) -> None:
    results = run_on(world_size)(faults, layout, optimizer)
    for result in results:
        assert result == results[0]
        for name, text, unchanged, late, steps, moved in result:
            assert f"{name}: " in text
            assert f"on rank {world_size - 1}" in text
            assert "step 3" in text
            assert (unchanged, late, steps, moved) == (True, True, 2, True)


def skipped(rank: int, world_size: int, layout: str) -> tuple[Any, ...]:
    with simulated_device(), nccl():
        model, made = make(layout, nonfinite="skip_step")
        models.set_gradients(model, 1, 3)
        if rank == 0:
            nan(model, MATRIX)
        before = everything(model, made)
        made.step()
        counts = [made.metrics()["optimizer/steps_skipped"]]
        saved = made.control_state_dict() if rank == 0 else None  # by one rank alone
        models.set_gradients(model, 1, 4)
        unchanged = same_bits(everything(model, made), before)
        made.step()
        made.check_last_update()
        counts.append(made.metrics()["optimizer/steps_skipped"])
        reference_model, reference = make(layout, nonfinite="skip_step")
        models.set_gradients(reference_model, 1, 4)
        reference.step()
        same = same_bits(everything(model, made), everything(reference_model, reference))
    return unchanged, same, counts, made.num_steps_taken, saved


@pytest.mark.parametrize(("layout", "world_size"), WORLDS)
def test_a_skipped_step_is_counted_once_it_is_known(
    run_on: Ranks, layout: str, world_size: int
) -> None:
    results = run_on(world_size)(skipped, layout)
    for unchanged, same, counts, steps, _ in results:
        assert (unchanged, same, counts, steps) == (True, True, [0.0, 1.0], 4)
    saved = results[0][4]
    assert (saved["steps_taken"], saved["steps_skipped"]) == (3, 1)


def unlike(rank: int, world_size: int) -> tuple[bool, str, list[int]]:
    with simulated_device(), nccl():
        model, made = make("fsdp")
        models.set_gradients(model, 1, 3)
        made.param_groups[0]["lr"] = 1e-2 * (1 + rank)
        before = everything(model, made)
        made.step()
        unchanged = same_bits(everything(model, made), before)
        # Saving raises nothing, and saves the state before the step.
        steps = [made.control_state_dict()["steps_taken"], made.num_steps_taken]
        with pytest.raises(RankMismatchError) as raised:
            made.step()
        return unchanged, str(raised.value), [*steps, made.num_steps_taken]


def test_unlike_hyperparameters_change_nothing(run_on: Ranks) -> None:
    for unchanged, error, steps in run_on(2)(unlike):
        assert unchanged
        assert "rank(s) 1 differ from rank 0; rank 0 has group 0: lr 0.01, " in error
        assert steps == [2, 3, 2]


def save_after(rank: int, world_size: int, fault: str) -> tuple[list[str], dict[str, Any]]:
    """A state dict after a bad step, saved by each rank alone, and loaded by a fresh optimizer."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("amo_dist.engine.ballot")
    with simulated_device(), nccl():
        model, made = make("fsdp")
        models.set_gradients(model, 1, 3)
        if rank == 1:
            FAULTS[fault](model, MATRIX)
        made.step()
        logger.addHandler(handler)
        try:
            saved = made.state_dict()
        finally:
            logger.removeHandler(handler)
        made.load_state_dict(saved)
        control = made.control_state_dict()
    return messages, {key: control[key] for key in ("steps_taken", "steps_skipped")}


@pytest.mark.parametrize("fault", [*FAULTS])
def test_saving_after_a_bad_step_tells_and_saves(run_on: Ranks, fault: str) -> None:
    for messages, control in run_on(2)(save_after, fault):
        assert messages == ["step 3 changed nothing; the next step says why"]
        assert control == {"steps_taken": 2, "steps_skipped": 0}


def damaged(rank: int, world_size: int) -> list[tuple[str, bool]]:
    """Momentum with a NaN: the update is left out, and told by the step after the next."""
    found = []
    with simulated_device(), nccl():
        model, made = make("fsdp")
        momentum = made.state[model.get_parameter(MATRIX)]["momentum_buffer"]
        if rank == 0:
            local_tensor(momentum).view(-1)[0] = torch.nan
        for step in (3, 4, 5):
            models.set_gradients(model, 1, step)
            error = ""
            try:
                made.step()
            except NonFiniteUpdateError as raised:
                error = str(raised)
            finite = [bool(local_tensor(p).isfinite().all()) for p in model.parameters()]
            found.append((error, all(finite)))
    return found


def test_a_damaged_momentum_is_told(run_on: Ranks) -> None:
    for found in run_on(2)(damaged):
        assert [error.split(":")[0] for error, _ in found] == ["", "", MATRIX]
        assert all(finite for _, finite in found)


def terms(rank: int, world_size: int) -> list[Any]:
    """A gradient that is a term of a sum, which one rank lacks at last."""
    found: list[Any] = []
    with simulated_device():
        mesh, ones = init_device_mesh("cuda", (world_size,)), torch.ones(4, device="cuda")
        param = nn.Parameter(distribute_tensor(ones.clone(), mesh, [Replicate()]))
        groups = param_groups(models.build({"norm.weight": param}))
        made = Muon(groups, lr=0.5, weight_decay=0.0, allow_no_matrices=True)
        for step in (1, 2, 3):
            param.grad = None
            if rank == 0 or step < 3:
                param.grad = DTensor.from_local(ones.clone(), mesh, [Partial()], run_check=False)
            made.step()
            found.append(local_tensor(made.state[param]["exp_avg"]).cpu())
        with pytest.raises(MissingGradientError) as raised:
            made.step()
    return [*found, str(raised.value)]


def test_gradients_are_summed_where_all_have_them(run_on: Ranks) -> None:
    for first, second, third, error in run_on(2)(terms):
        torch.testing.assert_close(first, torch.full((4,), 0.2))
        torch.testing.assert_close(second, torch.full((4,), 0.38))
        assert torch.equal(third, second)
        assert error.startswith("norm.weight: found a gradient on rank 0 and none on rank 1")


def mixed(rank: int, world_size: int) -> list[str]:
    """One rank has loaded state, which makes it wait, and the other one has not."""
    errors = []
    with simulated_device(), nccl():
        param = nn.Parameter(torch.ones(4, device="cuda"))
        groups = param_groups(models.build({"norm.bias": param}))
        made = Muon(groups, lr=0.5, process_group=dist.group.WORLD, allow_no_matrices=True)
        for step in range(1, 5):
            param.grad = torch.ones(4, device="cuda")
            if (rank, step) == (1, 3):
                made.load_control_state_dict(made.control_state_dict())
            try:
                made.step()
                errors.append("")
            except RankMismatchError as error:
                return [*errors, str(error)]
    return errors


def test_ranks_that_wait_meet_ranks_that_do_not(run_on: Ranks) -> None:
    goes_on, waits = run_on(2)(mixed)
    assert (goes_on[:-1], waits[:-1]) == (["", "", ""], ["", ""])
    for error, line in ((goes_on[-1], "does not wait for"), (waits[-1], "waits for")):
        assert "ranks are about to do different things" in error
        assert f"\n{line} the verdict\n" in error
