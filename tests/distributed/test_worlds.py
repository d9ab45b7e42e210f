"""Optimizers over some of the ranks of a job, beside one another."""

from __future__ import annotations

import copy
import pickle
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from amo_dist import AMO, AMOConfig, Muon, param_groups
from amo_dist.distributed.ranks import Membership
from amo_dist.optimizers import muon
from tests import runs
from tests.distributed import models
from tests.distributed.harness import GLOO_TIMEOUT, Ranks, raised

pytestmark = pytest.mark.slow

WQ = runs.WQ


def on_mesh(mesh: DeviceMesh | None) -> nn.Module:
    model = models.plain_model(models.shapes())
    return model if mesh is None else models.shard(model, mesh)


def train(model: nn.Module, seed: int, group: Any = None, *, copies: bool = False) -> Any:
    """Observed, guarded, loaded, and copied where asked: whole parameters and control state."""
    config = AMOConfig(**runs.PHASES, ns_guard_every=3, bucket_bytes=256)
    optimizer = AMO(param_groups(model), lr=3e-3, config=config, process_group=group)
    for step in range(1, 9):
        runs.train(model, optimizer, step, step, seed=seed)
        if step == 5:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if step == 3 and copies:
            model, optimizer = pickle.loads(pickle.dumps((model, optimizer)))
        optimizer.check_last_update()
    return runs.weights(model), optimizer.control_state_dict()


def same(one: Any, other: Any) -> bool:
    return bool(one[1] == other[1]) and runs.equal(one[0], other[0])


def on_some_ranks(rank: int, world_size: int, layout: str, ranks: list[int]) -> Any:
    """The model is on some ranks; the others never hear of it."""
    mesh = group = None
    if layout == "plain":
        group = dist.new_group(ranks)
    elif layout == "fsdp":
        mesh = DeviceMesh("cpu", ranks)
    else:
        pairs = [[each] for each in ranks]
        mesh = DeviceMesh("cpu", pairs, mesh_dim_names=("replicate", "shard"))
    return train(on_mesh(mesh), 1, group, copies=layout == "plain") if rank in ranks else None


@pytest.mark.parametrize(
    ("layout", "ranks"), [("fsdp", [1, 2]), ("hsdp", [0, 2]), ("plain", [1, 2])]
)
def test_a_model_on_some_ranks_trains_there(run_on: Ranks, layout: str, ranks: list[int]) -> None:
    expected = train(on_mesh(None), 1)
    results = run_on(3)(on_some_ranks, layout, ranks)
    assert [each is None for each in results] == [rank not in ranks for rank in range(3)]
    assert all(same(results[rank], expected) for rank in ranks)


def without_a_group(rank: int, world_size: int) -> Any:
    """HSDP on four of five ranks: no axis of the mesh has a group of all four."""
    mesh = DeviceMesh("cpu", [[0, 2], [3, 4]], mesh_dim_names=("replicate", "shard"))
    error = raised(lambda: train(on_mesh(mesh), 1)) if rank != 1 else ""
    group = dist.new_group([0, 2, 3, 4])
    if rank == 1:
        return error, None
    result = train(on_mesh(mesh), 1, group)
    assert same(train(on_mesh(mesh), 1), result)  # finds what the job has
    dist.destroy_process_group(group)
    return error, result


def test_ranks_that_have_no_group_say_how_to_make_one(run_on: Ranks) -> None:
    results = run_on(5)(without_a_group)
    assert results.pop(1) == ("", None)
    expected = train(on_mesh(None), 1)
    for error, result in results:
        assert error.startswith("ValueError: process_group: found no group of ranks [0, 2, 3, 4]")
        assert "dist.new_group([0, 2, 3, 4])" in error
        assert same(result, expected)


def side_by_side(rank: int, world_size: int, meshes: list[list[int]]) -> list[Any]:
    """Optimizers, each over its ranks, step in turn; the last rank's NaN is only its world's."""
    pairs: list[tuple[nn.Module, Muon] | None] = []
    for ranks in meshes:
        mesh = DeviceMesh("cpu", ranks)
        model = on_mesh(mesh) if rank in ranks else None
        pairs.append(model and (model, Muon(param_groups(model), lr=1e-2)))
    for step in (1, 2, 3):
        for seed, pair in enumerate(pairs):
            if pair is not None:
                runs.train(*pair, step, step, seed=seed)
    results: list[Any] = [pair and runs.weights(pair[0]) for pair in pairs]
    if (pair := pairs[-1]) is not None:
        models.set_gradients(pair[0], 1, 4)
        if rank == 2:
            pair[0].get_parameter(WQ).grad.to_local().fill_(torch.nan)  # type: ignore[union-attr]
        results.append(raised(pair[1].step))
    return results


@pytest.mark.parametrize("meshes", [[[0, 1], [1, 2]], [[0, 1, 2], [1, 2]]])
def test_optimizers_live_side_by_side(run_on: Ranks, meshes: list[list[int]]) -> None:
    results = run_on(3)(side_by_side, meshes)
    for number, ranks in enumerate(meshes):
        model = on_mesh(None)
        expected = runs.train(model, Muon(param_groups(model), lr=1e-2), 1, 3, seed=number)
        for rank in range(3):
            own = results[rank][number]
            assert runs.equal(own, expected) if rank in ranks else own is None
    # Errors name ranks of the job.
    assert results[1][-1] == results[2][-1]
    assert results[1][-1].startswith(f"NonFiniteGradientError: {WQ}")
    assert "on rank 2 in step 4" in results[1][-1]


# ---------------------------------------------------------------- worlds that cannot be


def build_wrongly(rank: int, world_size: int) -> list[str]:
    outside, model = dist.new_group([0]), models.make_model("fsdp", models.shapes())
    groups: tuple[Any, ...] = (outside, [0, 1])
    own = DeviceMesh("cpu", [0])
    weight = distribute_tensor(torch.ones(4, 4), own, [Shard(0)], src_data_rank=None)
    private = models.build({WQ: nn.Parameter(weight)})
    errors = [raised(lambda g=g: Muon(param_groups(model), process_group=g)) for g in groups]  # type: ignore[misc]
    plain = models.plain_model(runs.SHAPES)
    optimizer = Muon(param_groups(plain), process_group=dist.group.WORLD)
    with mock.patch.object(dist, "get_backend_config", return_value="cuda:nccl"):
        errors.append(raised(optimizer.step))
    return [*errors, raised(lambda: Muon(param_groups(private)))]


def test_a_process_group_must_have_this_rank_all_meshes_and_the_device(run_on: Ranks) -> None:
    first, second = run_on(2)(build_wrongly)
    assert "process_group: found ranks (0,), expected all of (0, 1)" in first[0]
    assert "on rank 1, expected a process group with this rank in it" in second[0]
    for _, values, backend, _ in (first, second):
        assert "process_group: found [0, 1]" in values
        assert "found the backends 'cuda:nccl' and parameters on cpu" in backend
    assert first[3] == ""
    assert second[3] == f"ValueError: {WQ}: found rank 1, expected one of its mesh's ranks, (0,)"


def chain(rank: int, world_size: int) -> list[str]:
    """Each rank shares one mesh with the next one, so that none knows of all."""
    meshes = [DeviceMesh("cpu", ranks) for ranks in ([0, 1], [1, 2])]
    tensors: dict[str, Tensor] = {}
    for layer, mesh in enumerate(meshes):
        if mesh.get_coordinate() is not None:
            linear = nn.Linear(4, 4, bias=False)
            fully_shard(linear, mesh=mesh)
            tensors[f"layers.{layer}.attention.wq.weight"] = linear.weight
    model, errors = models.build(tensors), []
    muon._num_made.clear()  # an optimizer without a group counts among those of other ranks
    for group in (dist.group.WORLD, None):
        optimizer = Muon(param_groups(model), process_group=group)
        errors.append(raised(lambda own=optimizer: runs.train(model, own, 1, 1)))  # type: ignore[misc]
    muon._num_made.clear()
    return errors


def test_meshes_that_only_overlap_need_a_process_group(run_on: Ranks) -> None:
    for (with_group, error), ranks in zip(
        run_on(3)(chain), ("[0, 1]", "[0, 1, 2]", "[1, 2]"), strict=True
    ):
        assert f"this rank has {ranks}, the ranks of its parameters' meshes" in error
        assert with_group == ""


def timeouts(rank: int, world_size: int) -> set[float]:
    """Time-outs in seconds of the job's group, and of a group that the optimizer makes."""
    membership = Membership([], dist.group.WORLD)
    pairs = [(0, 1)] if rank < 2 else []
    made = [dist.group.WORLD, *membership.groups(pairs, dist.group.WORLD).values()]
    backends = [group._get_backend(torch.device("cpu")) for group in made if group is not None]
    return {backend.options._timeout.total_seconds() for backend in backends}


def test_new_groups_wait_as_long_as_that_of_the_job(run_on: Ranks) -> None:
    assert run_on(3)(timeouts) == [{GLOO_TIMEOUT}] * 3
