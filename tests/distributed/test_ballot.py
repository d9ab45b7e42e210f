"""What is wrong on one rank is raised on all: on a CPU at once, on devices by the next step."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from amo_dist import AdaMuon, Muon, NorMuon, param_groups
from amo_dist.distributed.layout import local_tensor
from tests import runs
from tests.distributed import models
from tests.distributed.harness import Ranks, raised
from tests.nccl import nccl
from tests.simulated_device import Device, simulated_device

MATRIX, REST = "layers.1.attention.wq.weight", "tok_embeddings.weight"
MOMENTUM = "momentum_buffer"
DEVICES = pytest.mark.parametrize("device", ["cpu", "cuda"])


@contextlib.contextmanager
def on(device: str) -> Iterator[Device | None]:
    """Code inside runs on the CPU, or on a simulated device over NCCL."""
    if device == "cpu":
        yield None
        return
    with simulated_device() as simulated, nccl():
        yield simulated


def held(model: nn.Module, optimizer: Muon) -> list[tuple[Tensor, Tensor]]:
    """This rank's part of each parameter and state tensor, and a copy of it."""
    state = [value for values in optimizer.state.values() for value in values.values()]
    local = [local_tensor(tensor) for tensor in [*model.parameters(), *state]]
    return [(tensor, tensor.clone()) for tensor in local]


def is_unchanged(pairs: list[tuple[Tensor, Tensor]]) -> bool:
    """Whether no bit of what was held has changed."""
    sides = ([each.reshape(-1).view(torch.uint8) for each in pair] for pair in pairs)
    return all(torch.equal(*pair) for pair in sides)


# ---------------------------------------------------------------- faults of one rank


def spoil(name: str, value: float) -> Callable[[nn.Module, Muon], None]:
    def fault(model: nn.Module, optimizer: Muon) -> None:
        grad = model.get_parameter(name).grad
        assert grad is not None
        local_tensor(grad).view(-1)[0] = value

    return fault


def drop(name: str) -> Callable[[nn.Module, Muon], None]:
    def fault(model: nn.Module, optimizer: Muon) -> None:
        model.get_parameter(name).grad = None

    return fault


def whole(model: nn.Module, optimizer: Muon) -> None:
    """A plain gradient of a DTensor, as sparse ones are."""
    param = model.get_parameter(MATRIX)
    param.grad = torch.zeros(param.shape, device=param.device)


def rate(value: float) -> Callable[[nn.Module, Muon], None]:
    def fault(model: nn.Module, optimizer: Muon) -> None:
        optimizer.param_groups[0]["lr"] = value

    return fault


NAN, MISSING = "NonFiniteGradientError", "MissingGradientError"
FAULTS: dict[str, tuple[Callable[[nn.Module, Muon], None], str, str]] = {
    "nan": (spoil(MATRIX, torch.nan), NAN, f": {MATRIX}: found a NaN"),
    "inf": (spoil(REST, torch.inf), NAN, f": {REST}: found a NaN"),
    "too large": (spoil(REST, 1e30), NAN, f": {REST}: found a NaN"),
    "missing": (drop(MATRIX), MISSING, f": {MATRIX}: found a gradient on rank"),
    "missing of AdamW": (drop(REST), MISSING, f": {REST}: found a gradient on rank"),
    "whole": (whole, "ValueError", f"{MATRIX}: found a plain gradient"),
    "other rate": (rate(0.5), "RankMismatchError", "group 0: lr 0.01, "),
    "bad rate": (rate(torch.nan), "ValueError", "groups[0].lr: found nan"),
}
"""Fault, error, and the field that the error names."""


def fail(rank: int, world_size: int, layout: str, device: str, kind: type[Muon]) -> dict[str, Any]:
    """Error, whether anything changed, and steps taken; then whether training goes on."""
    results = {}
    last = world_size - 1
    for name, (fault, error_kind, _) in FAULTS.items():
        with on(device) as simulated:
            model, optimizer = runs.make(layout, kind, device=device, bucket_bytes=256)
            runs.train(model, optimizer, 1, 2)
            before = held(model, optimizer)
            groups = [dict(group) for group in optimizer.param_groups]
            models.set_gradients(model, 1, 3)
            if rank == last:
                fault(model, optimizer)
            if simulated is not None:
                simulated.clear()
                optimizer.step()
                # A rank that cannot prepare its step asks whether the others wait.
                assert not simulated.waits or (error_kind == "ValueError" and rank == last)
                assert is_unchanged(before)
                models.set_gradients(model, 1, 4)
            error = raised(optimizer.step)
            result = error, is_unchanged(before), optimizer.num_steps_taken
            for group, good in zip(optimizer.param_groups, groups, strict=True):
                group.update(good)
            runs.train(model, optimizer, 3, 3)
            results[name] = *result, not is_unchanged(before)
    return results


@DEVICES
@pytest.mark.parametrize(
    ("layout", "world_size", "kind"),
    [("fsdp", 2, Muon), ("hsdp", 4, AdaMuon), ("fsdp", 2, NorMuon)],
)
def test_a_fault_of_one_rank_is_raised_on_all_and_changes_nothing(
    run_on: Ranks, layout: str, world_size: int, kind: type[Muon], device: str
) -> None:
    results = run_on(world_size)(fail, layout, device, kind)
    assert all(result == results[0] for result in results)
    for name, (error, *outcome) in results[0].items():
        _, expected, field = FAULTS[name]
        assert error.startswith(expected), name
        assert field in error, name
        assert f"rank {world_size - 1}" in error or "rank(s) " in error
        assert outcome == [True, 2, True], name


# ---------------------------------------------------------------- devices


def save(rank: int, world_size: int, rule: str) -> tuple[Any, ...]:
    """One rank alone saves after a bad step; the next step has its verdict."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("amo_dist.engine.ballot")
    with on("cuda"):
        model, optimizer = runs.make("fsdp", Muon, device="cuda", nonfinite=rule)
        runs.train(model, optimizer, 1, 2)
        models.set_gradients(model, 1, 3)
        if rank == 0:
            spoil(MATRIX, torch.nan)(model, optimizer)
        optimizer.step()
        logger.addHandler(handler)
        saved = optimizer.control_state_dict() if rank == 0 else {}
        logger.removeHandler(handler)
        with pytest.raises(ValueError, match="load_state_dict failed"):
            optimizer.load_state_dict({"state": {}, "param_groups": []})
        error = raised(lambda: runs.train(model, optimizer, 4, 4))
        optimizer.check_last_update()
        counts = [saved.get(key) for key in ("steps_taken", "steps_skipped")]
        skipped = optimizer.metrics()["optimizer/steps_skipped"]
    return counts, messages, error, optimizer.num_steps_taken, skipped


@pytest.mark.parametrize(
    ("rule", "counts", "steps", "skipped"),
    [("error", [2, 0], 2, 0.0), ("skip_step", [3, 1], 4, 1.0)],
)
def test_a_bad_step_is_saved_as_what_it_was(
    run_on: Ranks, rule: str, counts: list[int], steps: int, skipped: float
) -> None:
    """The refused load between has a landing of its own: its maximum is not read as the step's."""
    first, second = run_on(2)(save, rule)
    assert first[:2] == (counts, ["step 3 changed nothing; the next step says why"])
    assert first[2:] == second[2:] == (first[2], steps, skipped)
    assert first[2].startswith("NonFiniteGradientError" if rule == "error" else "")
    assert bool(first[2]) == (rule == "error")


def mixed(rank: int, world_size: int) -> list[str]:
    """One rank has loaded state, which makes it wait, and the other one has not."""
    with on("cuda"):
        param = nn.Parameter(torch.ones(4, device="cuda"))
        groups = param_groups(models.build({"norm.bias": param}))
        optimizer = Muon(groups, process_group=dist.group.WORLD, allow_no_matrices=True)
        errors = []
        for step in range(1, 5):
            param.grad = torch.ones(4, device="cuda")
            if (rank, step) == (1, 3):
                optimizer.load_control_state_dict(optimizer.control_state_dict())
            errors.append(raised(optimizer.step))
            if errors[-1]:
                break
    return errors


def test_ranks_that_wait_meet_ranks_that_do_not(run_on: Ranks) -> None:
    goes_on, waits = run_on(2)(mixed)
    assert (goes_on[:-1], waits[:-1]) == (["", "", ""], ["", ""])
    assert all(errors[-1].startswith("RankMismatchError") for errors in (goes_on, waits))
    assert "\ndoes not wait for" in goes_on[-1]
    assert "\nwaits for" in waits[-1]


# ---------------------------------------------------------------- updates


def damage(rank: int, world_size: int, device: str) -> tuple[set[str], bool, bool]:
    with on(device):
        model, optimizer = runs.make("hsdp", Muon, device=device, nonfinite="skip_step")
        runs.train(model, optimizer, 1, 2)
        if rank % 2 == 0:  # the first shard, in both replicas of HSDP: they never differ
            momentum = optimizer.state[model.get_parameter(MATRIX)][MOMENTUM]
            local_tensor(momentum).view(-1)[0] = torch.nan
        runs.train(model, optimizer, 3, 3)
        is_finite = all(bool(local_tensor(p).isfinite().all()) for p in model.parameters())
        before = held(model, optimizer)
        if rank == 0:
            optimizer.state_dict()  # by one rank alone: nothing is communicated
        models.set_gradients(model, 1, 4)
        errors = {raised(optimizer.check_last_update)}
        if device == "cuda":
            optimizer.step()
        errors.add(raised(optimizer.step))
        return errors, is_finite, is_unchanged(before)


@DEVICES
def test_a_damaged_momentum_is_named_by_all_ranks_one_step_late(run_on: Ranks, device: str) -> None:
    for (error, *others), is_finite, unchanged in run_on(4)(damage, device):
        assert error.startswith(f"NonFiniteUpdateError: {MATRIX}: ")
        assert (others, is_finite, unchanged) == ([], True, True)


# ---------------------------------------------------------------- who must have a gradient


def share(rank: int, world_size: int) -> list[tuple[str, list[bool]]]:
    """Each rank's own tensor, each pair's, one of all four, and experts whole on their ranks."""
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "member"))["member"]
    mesh = init_device_mesh("cpu", (world_size,))
    experts = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(0))
    params = {
        "private.bias": nn.Parameter(torch.ones(4)),
        "pair.bias": nn.Parameter(distribute_tensor(torch.ones(4), pairs, [Shard(0)])),
        "all.bias": nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)])),
        "layers.0.moe.experts.w1": nn.Parameter(distribute_tensor(experts, mesh, [Shard(0)])),
        "layers.0.attention.wq.weight": nn.Parameter(
            distribute_tensor(torch.eye(4), mesh, [Shard(0)])
        ),
    }
    model = models.build(params)
    optimizer = Muon(param_groups(model), lr=0.5)
    private, pair, everyone, stack, _ = params
    results = []
    cases: list[tuple[str, set[int]]] = [
        *((private, {1}), (stack, {1, 3}), (pair, {2, 3}), (pair, {3}), (everyone, {3})),
    ]
    for name, without in cases:
        for key, param in params.items():
            param.grad = None if key == name and rank in without else torch.ones_like(param)
        before = [local_tensor(param).clone() for param in params.values()]
        error = raised(optimizer.step)
        both = zip(before, params.values(), strict=True)
        results.append((error, [not torch.equal(old, local_tensor(new)) for old, new in both]))
    return results


def test_gradients_are_compared_among_the_ranks_that_need_them(run_on: Ranks) -> None:
    for rank, results in enumerate(run_on(4)(share)):
        private, stack, pair, half, everyone = results
        assert private == ("", [rank != 1, True, True, True, True])
        # Matrices of a stack of experts lie whole on their ranks: nobody gathers them.
        assert stack == ("", [True, True, True, rank not in (1, 3), True])
        assert pair == ("", [True, rank < 2, True, True, True])
        for (error, moved), name in ((half, "pair"), (everyone, "all")):
            start = f"MissingGradientError: {name}.bias: found a gradient on rank 2 and none on "
            assert error.startswith(f"{start}rank 3")
            assert moved == [False] * 5


def add_terms(rank: int, world_size: int, device: str) -> tuple[list[float], list[str]]:
    """Gradients that are terms of a sum: one that a rank lacks, too large a sum, and a NaN."""
    with on(device):
        mesh, ones = init_device_mesh(device, (world_size,)), torch.ones(4, device=device)
        param = nn.Parameter(distribute_tensor(ones.clone(), mesh, [Replicate()]))
        groups = param_groups(models.build({"norm.weight": param}))
        optimizer = Muon(groups, lr=0.5, weight_decay=0.0, allow_no_matrices=True)
        averages, errors = [], []
        for step in range(1, 8):
            # One term of 7e18 is below the largest gradient of AdamW, the sum of two is not.
            term = ones * (7e18 if step == 5 else torch.nan if (step, rank) == (7, 1) else 1.0)
            param.grad = DTensor.from_local(term, mesh, [Partial()], run_check=False)
            if (step, rank) == (3, 1):
                param.grad = None
            errors.append(raised(optimizer.step))
            averages.append(local_tensor(optimizer.state[param]["exp_avg"]).cpu()[0].item())
        errors.append(raised(optimizer.check_last_update))
    return averages, [error.partition(" on rank")[0] for error in errors]


@DEVICES
def test_gradients_are_summed_where_all_ranks_have_them(run_on: Ranks, device: str) -> None:
    missing = "MissingGradientError: norm.weight: found a gradient"
    bad = f"{NAN}: norm.weight: found a NaN, an inf or an entry too large for the optimizer's "
    bad += "state in its gradient"
    errors = ["", "", missing, "", bad, "", bad]
    errors = [*errors, ""] if device == "cpu" else ["", *errors]
    for averages, own in run_on(2)(add_terms, device):
        assert own == errors
        # exp_avg is a tenth of the gradient: it tells the sum from one term.
        later = [0.542, 0.542, 0.6878, 0.6878] if device == "cpu" else [0.38] * 4
        assert averages == pytest.approx([0.2, 0.38, 0.38, *later])


def test_steps_without_gradients_count_after_a_load() -> None:
    """Once there has been one with gradients, which the control state tells."""
    model, optimizer = runs.make(kind=Muon)
    runs.train(model, optimizer, 1, 3)
    _, resumed = runs.resume(model, optimizer, lambda: runs.make(kind=Muon))
    _, controlled = runs.make(kind=Muon)
    controlled.load_control_state_dict(optimizer.control_state_dict())
    for own in (resumed, controlled):
        own.step()
        assert own.num_steps_taken == 4
