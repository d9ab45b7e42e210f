"""Optimizers over some of the ranks of a job, beside one another."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from amo_dist import (
    AMO,
    AMOConfig,
    MissingGradientError,
    Muon,
    NonFiniteGradientError,
    RankMismatchError,
    param_groups,
)
from amo_dist.distributed.ranks import Membership
from amo_dist.tools.tracker import GeometryTracker
from tests.distributed import models
from tests.distributed.harness import GLOO_TIMEOUT, Ranks
from tests.distributed.test_layouts_more import FIELDS as STAGE_FIELDS
from tests.distributed.test_layouts_more import LR as STAGE_LR
from tests.distributed.test_layouts_more import STAGES, STEPS, Outcome, check, gradient, place

pytestmark = pytest.mark.slow

SEED = 3
FIELDS: dict[str, Any] = {
    "observe_until": 4,
    "observe_every": 2,
    "sample_size": 2,
    "transition_steps": 2,
    "bucket_bytes": 256,
    "ns_guard_every": 3,
}
WQ = "layers.0.attention.wq.weight"


class Run:
    """A model and its optimizer, step by step; observed, measured, guarded, saved and loaded."""

    def __init__(self, model: nn.Module, seed: int, process_group: Any = None) -> None:
        self.model, self.seed = model, seed
        config = AMOConfig(**FIELDS)
        self.optimizer = AMO(
            param_groups(model), lr=3e-3, config=config, process_group=process_group
        )
        self.tracked: list[int] = []
        self.optimizer.tracker = GeometryTracker(3, sink=self._note)

    def _note(self, step: int, records: Sequence[Any]) -> None:
        self.tracked.append(len(records))

    def step(self, step: int) -> None:
        models.set_gradients(self.model, self.seed, step)
        self.optimizer.step()
        if step == 5:
            self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        self.optimizer.check_last_update()

    def replace_by(self, copied: Callable[[Any], Any]) -> None:
        """Go on with a copy of both."""
        self.model, self.optimizer = copied((self.model, self.optimizer))
        self.optimizer.tracker = GeometryTracker(3, sink=self._note)

    def result(self) -> tuple[dict[str, Tensor], Any]:
        named = self.model.named_parameters()
        return {name: models.whole(p) for name, p in named}, self.optimizer.control_state_dict()


def pickled(both: Any) -> Any:
    return pickle.loads(pickle.dumps(both))


def on_mesh(mesh: DeviceMesh) -> nn.Module:
    return models._fully_shard(models.plain_model(models.shapes()), mesh)


def alone(rank: int, world_size: int, seed: int, layout: str = "fsdp") -> Any:
    """What a job has that runs nothing else."""
    group = dist.group.WORLD if layout == "plain" else None
    run = Run(models.make_model(layout, models.shapes()), seed, group)
    for step in range(1, 9):
        run.step(step)
    return run.result()


def same(found: Any, expected: Any) -> bool:
    return found[1] == expected[1] and all(
        torch.equal(found[0][name], expected[0][name]) for name in expected[0]
    )


def on_some_ranks(rank: int, world_size: int, how: str, ranks: list[int]) -> Any:
    """The model is on some ranks; the others never hear of it."""
    mesh, group = None, None
    if how == "copied":
        group = dist.new_group(ranks)
    elif how == "hsdp":
        mesh = DeviceMesh("cpu", [[each] for each in ranks], mesh_dim_names=("replicate", "shard"))
    else:
        mesh = DeviceMesh("cpu", ranks)
    if rank not in ranks:
        return None
    model = models.plain_model(models.shapes()) if mesh is None else on_mesh(mesh)
    run = Run(model, SEED, group)
    for step in range(1, 9):
        run.step(step)
        if how == "copied" and step in (3, 5):
            run.replace_by(copy.deepcopy if step == 3 else pickled)
    assert run.optimizer.world is not None
    assert run.optimizer.world.shares_all == (len(ranks) > 1)
    assert run.tracked == ([21, 21] if rank == ranks[0] else [])
    return run.result()


@pytest.mark.parametrize(
    ("how", "ranks"),
    [
        *(("fsdp", [1, 2]), ("hsdp", [0, 2]), ("copied", [1, 2])),
    ],
)
def test_a_model_on_some_ranks_trains_there(run_on: Ranks, how: str, ranks: list[int]) -> None:
    layout = "plain" if how == "copied" else "fsdp"
    expected = run_on(2)(alone, SEED, layout)[0]
    found = run_on(3, timeout=60.0)(on_some_ranks, how, ranks)
    assert [each is None for each in found] == [rank not in ranks for rank in range(3)]
    assert all(same(found[rank], expected) for rank in ranks)


def without_a_group(rank: int, world_size: int) -> Any:
    """HSDP on four of five ranks: no axis of the mesh has a group of all four."""
    mesh = DeviceMesh("cpu", [[0, 2], [3, 4]], mesh_dim_names=("replicate", "shard"))
    told = ""
    if rank != 1:
        try:
            Run(on_mesh(mesh), SEED).step(1)
        except ValueError as error:
            told = str(error)
    group = dist.new_group([0, 2, 3, 4])
    if rank == 1:
        return told, None
    results = []
    for given in (group, None):  # the second finds what the job has
        run = Run(on_mesh(mesh), SEED, given)
        for step in range(1, 9):
            run.step(step)
        results.append(run.result())
    assert same(*results)
    dist.destroy_process_group(group)
    return told, results[0]


def test_ranks_that_have_no_group_say_how_to_make_one(run_on: Ranks) -> None:
    found = run_on(5, timeout=60.0)(without_a_group)
    for told, _ in (*found[:1], *found[2:]):
        assert told == (
            "process_group: found no group of ranks [0, 2, 3, 4], those of the parameters' meshes, "
            "expected one where they are not the whole job: have all ranks of the job make it, "
            "group = dist.new_group([0, 2, 3, 4]), and pass process_group=group"
        )
    assert found[1] == ("", None)
    expected = run_on(4)(alone, SEED, "hsdp")[0]
    assert all(same(found[rank][1], expected) for rank in (0, 2, 3, 4))


def side_by_side(rank: int, world_size: int, teams: list[list[int]]) -> list[Any]:
    """Several optimizers, each over its ranks, step in turn."""
    meshes = [DeviceMesh("cpu", ranks) for ranks in teams]
    runs = [
        Run(on_mesh(mesh), seed) if rank in ranks else None
        for seed, (mesh, ranks) in enumerate(zip(meshes, teams, strict=True))
    ]
    for step in range(1, 9):
        for run in runs:
            if run is not None:
                run.step(step)
    return [run and run.result() for run in runs]


@pytest.mark.parametrize(
    "teams",
    [[[0, 1], [1, 2]], [[0, 1, 2], [1, 2]]],
    ids=["chain", "inside"],
)
def test_optimizers_live_side_by_side(run_on: Ranks, teams: list[list[int]]) -> None:
    found = run_on(3, timeout=60.0)(side_by_side, teams)
    for number, ranks in enumerate(teams):
        expected = run_on(len(ranks))(alone, number)[0]
        for rank in range(3):
            if rank in ranks:
                assert same(found[rank][number], expected)
            else:
                assert found[rank][number] is None


def faults(rank: int, world_size: int) -> list[str]:
    """Of gradients and of a rate on the second of two ranks, which is the third of the job."""
    mesh = DeviceMesh("cpu", [1, 2])
    if rank == 0:
        return []
    told = []
    for fault in ("nan", "missing", "rate", ""):
        run = Run(on_mesh(mesh), SEED)
        models.set_gradients(run.model, SEED, 1)
        param = run.model.get_parameter(WQ)
        if rank == 2 and fault == "nan":
            param.grad.to_local().fill_(torch.nan)  # type: ignore[union-attr]
        elif rank == 2 and fault == "missing":
            param.grad = None
        elif rank == 2 and fault == "rate":
            run.optimizer.param_groups[0]["lr"] = 0.5
        try:
            run.optimizer.step()
        except (NonFiniteGradientError, MissingGradientError, RankMismatchError) as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


def test_errors_name_ranks_of_the_job(run_on: Ranks) -> None:
    found = run_on(3, timeout=60.0)(faults)
    assert found[1] == found[2]
    nan, missing, rate = found[1]
    assert nan.startswith(f"NonFiniteGradientError: {WQ}")
    assert "on rank 2 in step 1" in nan
    assert "found a gradient on rank 1 and none on rank 2" in missing
    assert "rank(s) 2 differ from rank 1" in rate


def build_stage(mesh: DeviceMesh) -> nn.Module:
    return models.plain_model(STAGES[mesh.get_local_rank("pp")])


def train_stages(rank: int, world_size: int) -> Outcome:
    """Two stages of two replicas each: plain tensors, as under DDP."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    model = build_stage(mesh)
    optimizer = AMO(
        param_groups(model, allow_unused=True),
        lr=STAGE_LR,
        config=AMOConfig(**STAGE_FIELDS),
        process_group=mesh["dp"],
    )
    for step in range(1, STEPS + 1):
        for name, param in model.named_parameters():
            param.grad = gradient(step, name, tuple(param.shape))
        optimizer.step()
    params = {name: models.whole(param) for name, param in model.named_parameters()}
    assert optimizer.world is not None
    assert list(optimizer.world.groups_by_ranks) == [(0, 1) if rank < 2 else (2, 3)]
    return Outcome(params, params, optimizer.control_state_dict(), {}, 0)


def test_replicated_stages_are_one_world_by_a_slice_of_the_mesh(run_on: Ranks) -> None:
    check(run_on(4, timeout=60.0)(train_stages), STAGES[0] | STAGES[1], STAGE_FIELDS)


def build_wrongly(rank: int, world_size: int) -> list[str]:
    outside = dist.new_group([0])
    model, told = models.make_model("fsdp", models.shapes()), []
    for group in (outside, [0, 1]):
        try:
            Muon(param_groups(model), process_group=group)  # type: ignore[arg-type]
        except ValueError as error:
            told.append(str(error))
    return told


def test_a_process_group_must_have_this_rank_and_all_of_the_meshes(run_on: Ranks) -> None:
    found = run_on(2)(build_wrongly)
    assert "process_group: found ranks (0,), expected all of (0, 1)" in found[0][0]
    assert "on rank 1, expected a process group with this rank in it" in found[1][0]
    assert all("process_group: found [0, 1]" in told[1] for told in found)


def chain(rank: int, world_size: int) -> list[str]:
    """Each rank shares one mesh with the next one, so that none knows of all."""
    meshes = [DeviceMesh("cpu", ranks) for ranks in ([0, 1], [1, 2])]
    tensors: dict[str, Tensor] = {}
    for layer, mesh in enumerate(meshes):
        if mesh.get_coordinate() is not None:
            name = f"layers.{layer}.attention.wq.weight"
            linear = nn.Linear(4, 4, bias=False)
            fully_shard(linear, mesh=mesh)
            tensors[name] = linear.weight
    model, told = models.build(tensors), []
    for group in (None, dist.group.WORLD):
        optimizer = Muon(param_groups(model), process_group=group)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        try:
            optimizer.step()
        except RankMismatchError as error:
            told.append(str(error))
    return told


def test_meshes_that_only_overlap_need_a_process_group(run_on: Ranks) -> None:
    found = run_on(3, timeout=60.0)(chain)
    for told, ranks in zip(found, ("[0, 1]", "[0, 1, 2]", "[1, 2]"), strict=True):
        assert len(told) == 1
        assert f"this rank has {ranks}, the ranks of its parameters' meshes" in told[0]


def outside_of_the_mesh(rank: int, world_size: int) -> str:
    mesh = DeviceMesh("cpu", [0])
    linear = nn.Linear(4, 4, bias=False)
    tensor = distribute_tensor(linear.weight.detach(), mesh, [Shard(0)], src_data_rank=None)
    model = models.build({WQ: nn.Parameter(tensor)})
    try:
        Muon(param_groups(model))
    except ValueError as error:
        return str(error)
    return ""


def test_a_rank_outside_of_the_mesh_has_no_use_for_an_optimizer(run_on: Ranks) -> None:
    inside, outside = run_on(2)(outside_of_the_mesh)
    assert inside == ""
    assert outside == f"{WQ}: found rank 1, expected one of its mesh's ranks, (0,)"


def uneven_stages(rank: int, world_size: int, given: bool) -> Any:
    """A stage on ranks 0 and 1, one on the rest, or on the third where a group is given.

    Both are meshes of two axes.
    """
    stages = [[0, 1], [2] if given else [2, 3]]
    world = dist.new_group([0, 1, 2]) if given else None
    root = None if given else init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "r", "s"))
    meshes = [DeviceMesh("cpu", [ranks]) for ranks in stages] if given else []
    if given and rank == 3:
        return None
    mesh = meshes[rank // 2] if root is None else root["r", "s"]
    model = models.build(place(STAGES[rank // 2], {"": [Replicate(), Shard(0)]}, mesh))
    optimizer = AMO(
        param_groups(model, allow_unused=True),
        lr=STAGE_LR,
        config=AMOConfig(**STAGE_FIELDS),
        process_group=world,
    )
    for step in range(1, STEPS + 1):
        for name, param in model.named_parameters():
            param.grad = models.place_like(gradient(step, name, tuple(param.shape)), param)
        optimizer.step()
    params = {name: models.whole(param) for name, param in model.named_parameters()}
    assert optimizer.world is not None
    assert list(optimizer.world.groups_by_ranks) == [tuple(stages[rank // 2])]
    return Outcome(params, params, optimizer.control_state_dict(), {}, 0)


@pytest.mark.parametrize("given", [False, True], ids=["whole", "some"])
def test_stages_may_have_different_numbers_of_ranks(run_on: Ranks, given: bool) -> None:
    results = run_on(4, timeout=60.0)(uneven_stages, given)
    assert [each is None for each in results] == [False, False, False, given]
    found = [each for each in results if each is not None]
    check(found, STAGES[0] | STAGES[1], STAGE_FIELDS)


def timeouts(rank: int, world_size: int) -> set[float]:
    """Time-outs in seconds of the job's group, and of a group that the optimizer makes."""
    membership = Membership([], dist.group.WORLD)
    pairs = [(0, 1)] if rank < 2 else []
    made = [dist.group.WORLD, *membership.groups(pairs, dist.group.WORLD).values()]
    backends = [group._get_backend(torch.device("cpu")) for group in made if group is not None]
    return {backend.options._timeout.total_seconds() for backend in backends}


def test_new_groups_wait_as_long_as_that_of_the_job(run_on: Ranks) -> None:
    assert run_on(3)(timeouts) == [{GLOO_TIMEOUT}] * 3
