"""Bad numbers on one rank: the same answer on all of them, nothing changed, no hang."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from amo_dist import (
    AMO,
    AMOConfig,
    MissingGradientError,
    Muon,
    NonFiniteGradientError,
    NonFiniteUpdateError,
    param_groups,
)
from amo_dist.distributed.layout import local_tensor
from tests.distributed import models
from tests.distributed.harness import Ranks
from tests.distributed.test_late_verdict import everything

FIELDS = {"observe_until": 4, "observe_every": 2, "sample_size": 2, "transition_steps": 2}
MATRIX, REST = "layers.1.attention.wq.weight", "tok_embeddings.weight"
WORLDS = [pytest.param("hsdp", 4, id="hsdp-2x2")]


def make(layout: str, nonfinite: str) -> tuple[torch.nn.Module, AMO]:
    model = models.make_model(layout, models.shapes())
    config = AMOConfig(**FIELDS, nonfinite=nonfinite)
    return model, AMO(param_groups(model), lr=1e-2, config=config)


def spoil(model: torch.nn.Module, name: str, value: float) -> None:
    grad = model.get_parameter(name).grad
    assert grad is not None
    local_tensor(grad).view(-1)[0] = value


def bad_gradients(rank: int, world_size: int, layout: str) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    for rule in ("error", "skip_step"):
        model, optimizer = make(layout, rule)
        for step, name, value in (
            (1, MATRIX, float("nan")),
            (2, MATRIX, float("inf")),  # an observation is due
            (3, REST, 1e30),
            (4, REST, float("nan")),  # and the plan
        ):
            models.set_gradients(model, 1, step)
            if rank == world_size - 1:
                spoil(model, name, value)
            before = everything(model, optimizer)
            error = ""
            try:
                optimizer.step()
            except NonFiniteGradientError as raised:
                error = str(raised)
            unchanged = all(map(torch.equal, everything(model, optimizer), before))
            found.append((rule, name, error, unchanged, optimizer.num_steps_taken))
        for step in range(5, 8):
            models.set_gradients(model, 1, step)
            optimizer.step()
        skipped = optimizer.metrics()["optimizer/steps_skipped"]
        found.append((optimizer.phase, optimizer.control_state_dict(), skipped))
    return found


@pytest.mark.parametrize(("layout", "world_size"), WORLDS)
def test_one_bad_gradient_stops_or_skips_all_ranks(
    run_on: Ranks, layout: str, world_size: int
) -> None:
    results = run_on(world_size)(bad_gradients, layout)
    assert all(result == results[0] for result in results)
    errors, skips = results[0][:4], results[0][5:9]
    for rule, name, error, unchanged, steps in errors:
        assert unchanged
        assert (rule, steps) == ("error", 0)
        assert error.startswith(f"{name}: ")
        assert f"on rank {world_size - 1} " in error
    for number, (rule, _, error, unchanged, steps) in enumerate(skips, start=1):
        assert unchanged
        assert (rule, error, steps) == ("skip_step", "", number)
    phase, control, num_skipped = results[0][9]
    assert (phase, num_skipped) == ("locked", 4)
    invalid = [set(seen["ell"].values()) for seen in control["policy"]["observations"]]
    assert invalid == [{None}, {None}]


def missing(rank: int, world_size: int, layout: str) -> tuple[bool, list[str], list[bool]]:
    model, optimizer = make(layout, "error")
    before = everything(model, optimizer)
    names = [name for name, _ in model.named_parameters()]
    models.set_gradients(model, 1, 1, missing=frozenset({MATRIX, REST}))
    optimizer.step()
    after = everything(model, optimizer)
    moved = {n for n, a, b in zip(names, before, after, strict=False) if not torch.equal(a, b)}
    still = not moved & {MATRIX, REST}
    errors, unchanged = [], []
    for name in (MATRIX, REST):
        gone = {name} if rank == 1 else set()
        models.set_gradients(model, 1, 2, missing=frozenset(gone))
        before = everything(model, optimizer)
        try:
            optimizer.step()
        except MissingGradientError as error:
            errors.append(str(error))
        unchanged.append(all(map(torch.equal, everything(model, optimizer), before)))
    return still, errors, unchanged


@pytest.mark.parametrize(("layout", "world_size"), WORLDS)
def test_gradients_missing_everywhere_or_on_one_rank(
    run_on: Ranks, layout: str, world_size: int
) -> None:
    for still, errors, unchanged in run_on(world_size)(missing, layout):
        assert still
        assert [error.split(":")[0] for error in errors] == [MATRIX, REST]
        assert all("none on rank 1" in error for error in errors)
        assert all(unchanged)


def missing_where_not_shared(rank: int, world_size: int) -> list[tuple[str, list[bool]]]:
    """Tensors of one name: each rank's own, each pair's own, and one that all four share."""
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "member"))["member"]
    mesh = init_device_mesh("cpu", (world_size,))
    params = {
        "private": nn.Parameter(torch.ones(4)),
        "pair": nn.Parameter(distribute_tensor(torch.ones(4), pairs, [Shard(0)])),
        "all": nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)])),
    }
    model = models.build({f"{name}.bias": param for name, param in params.items()})
    optimizer = Muon(param_groups(model), lr=0.5, allow_no_matrices=True)
    found = []
    for name, gone in (("private", {1}), ("pair", {2, 3}), ("pair", {3}), ("all", {3})):
        models.set_gradients(model, 1, 1)
        if rank in gone:
            params[name].grad = None
        before = [local_tensor(param).clone() for param in params.values()]
        error = ""
        try:
            optimizer.step()
        except MissingGradientError as raised:
            error = str(raised)
        pairs_of = zip(before, params.values(), strict=True)
        found.append((error, [not torch.equal(old, local_tensor(new)) for old, new in pairs_of]))
    return found


def test_gradients_are_compared_among_the_ranks_that_share_a_parameter(run_on: Ranks) -> None:
    results = run_on(4)(missing_where_not_shared)
    for rank, (private, pair, half, all_ranks) in enumerate(results):
        assert private == ("", [rank != 1, True, True])
        assert pair == ("", [True, rank < 2, True])
        # Of the ranks with a gradient that of the pair is named, not the greatest of the world.
        assert half[0].startswith("pair.bias: found a gradient on rank 2 and none on rank 3")
        assert all_ranks[0].startswith("all.bias: found a gradient on rank 2 and none on rank 3")
        assert half[1] == all_ranks[1] == [False, False, False]


def foreign_where_not_shared(rank: int, world_size: int) -> str:
    param = nn.Parameter(torch.ones(4))
    groups = param_groups(models.build({"norm.bias": param}))
    optimizer = Muon(groups, lr=0.5, allow_no_matrices=True)
    param.grad = torch.ones(4).to_sparse() if rank == 1 else None
    with pytest.raises(ValueError, match=r"norm\.bias: found a sparse gradient") as caught:
        optimizer.step()
    return str(caught.value)


def test_a_foreign_gradient_of_a_private_tensor_is_told_on_all_ranks(run_on: Ranks) -> None:
    for error in run_on(2)(foreign_where_not_shared):
        assert "on rank 1" in error


def missing_before_communication(rank: int, world_size: int) -> tuple[str, Tensor]:
    """A gradient that is a term of a sum (sequence parallelism), missing on one rank."""
    mesh = init_device_mesh("cpu", (world_size,))
    param = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
    model = models.build({"norm.weight": param})
    optimizer = Muon(param_groups(model), lr=0.5, weight_decay=0.0, allow_no_matrices=True)
    term = DTensor.from_local(torch.ones(4), mesh, [Partial()], run_check=False)
    param.grad = term if rank == 0 else None
    with pytest.raises(MissingGradientError) as caught:
        optimizer.step()
    param.grad = term
    optimizer.step()
    # exp_avg is a tenth of the gradient: it tells the sum from one term.
    return str(caught.value), local_tensor(optimizer.state[param]["exp_avg"]).clone()


def test_a_missing_gradient_is_told_before_the_others_are_summed(run_on: Ranks) -> None:
    for error, average in run_on(2)(missing_before_communication):
        assert error.startswith("norm.weight: found a gradient on rank 0 and none on rank 1")
        torch.testing.assert_close(average, torch.full((4,), 0.2))


def bad_after_communication(rank: int, world_size: int) -> str:
    """A term of a sum with a NaN on one rank: the sum has it everywhere."""
    mesh = init_device_mesh("cpu", (world_size,))
    param = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
    groups = param_groups(models.build({"norm.weight": param}))
    optimizer = Muon(groups, lr=0.5, allow_no_matrices=True)
    term = torch.full((4,), torch.nan if rank == 1 else 1.0)
    param.grad = DTensor.from_local(term, mesh, [Partial()], run_check=False)
    with pytest.raises(NonFiniteGradientError) as caught:
        optimizer.step()
    assert torch.equal(local_tensor(param), torch.ones(4))
    return str(caught.value)


def test_sums_are_judged_once_they_have_been_taken(run_on: Ranks) -> None:
    for error in run_on(2)(bad_after_communication):
        assert error.startswith("norm.weight: found a NaN")


def _equal_with_nan(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.nan_to_num(), right.nan_to_num())


def damaged_momentum(rank: int, world_size: int, layout: str) -> tuple[str, bool, bool]:
    model, optimizer = make(layout, "skip_step")
    models.set_gradients(model, 1, 1)
    optimizer.step()
    if rank % 2 == 0:  # the first shard, in both replicas of HSDP: they never differ
        momentum = optimizer.state[model.get_parameter(MATRIX)]["momentum_buffer"]
        local_tensor(momentum).view(-1)[0] = torch.nan
    models.set_gradients(model, 1, 2)
    optimizer.step()
    finite = all(bool(local_tensor(param).isfinite().all()) for param in model.parameters())
    before = everything(model, optimizer)
    if rank == 0:
        optimizer.state_dict()  # by one rank alone: nothing is communicated
    models.set_gradients(model, 1, 3)
    errors = set()
    for look in (optimizer.check_last_update, optimizer.step):
        with pytest.raises(NonFiniteUpdateError) as raised:
            look()
        errors.add(str(raised.value))
    (error,) = errors
    after = everything(model, optimizer)
    same = all(map(_equal_with_nan, after, before))
    return error, finite, same


@pytest.mark.parametrize(("layout", "world_size"), WORLDS)
def test_damaged_momentum_is_named_by_all_ranks_one_step_late(
    run_on: Ranks, layout: str, world_size: int
) -> None:
    results = run_on(world_size)(damaged_momentum, layout)
    for error, finite, same in results:
        assert error == results[0][0]
        assert error.startswith(f"{MATRIX}: ")
        assert finite
        assert same
