"""Matrices that ranks share: the twin's results to rounding, on every layout."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from amo_dist import AMO, AMOConfig, Muon, MuonConfig, param_groups
from amo_dist.engine.verdict import NonFiniteUpdateError
from amo_dist.schedule.types import Schedule
from tests.distributed import models
from tests.distributed.harness import Ranks
from tests.oracle import Oracle

pytestmark = pytest.mark.slow

LR, SEED, STEPS = 3e-3, 7, 10
FIELDS: dict[str, Any] = {
    "observe_until": 4,
    "observe_every": 2,
    "sample_size": 1,
    "transition_steps": 3,
    "bucket_bytes": 256,
    "ns_guard_every": 3,
}
Shapes = dict[str, tuple[int, ...]]
UNEVEN: Shapes = {
    # Tall and wide; slabs of unlike widths, and narrower than the short side.
    "layers.0.attention.wq.weight": (37, 6),
    "layers.0.attention.wk.weight": (3, 8),
    "layers.0.attention.wv.weight": (1, 8),
    "layers.0.attention.wo.weight": (11, 13),
    "layers.0.feed_forward.w2.weight": (5, 33),
    "layers.0.attention_norm.weight": (7,),
}
EVEN: Shapes = {
    "layers.0.attention.wq.weight": (36, 6),
    "layers.0.attention.wo.weight": (12, 12),
    "layers.0.feed_forward.w2.weight": (6, 36),
    "layers.0.attention_norm.weight": (8,),
}
TYPES = {name: kind for name, kind in models.types().items() if name in UNEVEN}
Shared = set[tuple[tuple[int, ...], tuple[str, ...]]]
"""Teams of a rank, with the names of what they share."""


@contextlib.contextmanager
def free_sends() -> Iterator[None]:
    """Small matrices are shared where sending takes no time."""
    with mock.patch("amo_dist.distributed.teams.FLOPS_PER_BYTE", 0):
        yield


def shared_by(optimizer: Muon) -> Shared:
    engine = optimizer._engine
    matrices = engine.parameters.matrices
    return {
        (team, tuple(matrices[job.matrix].name for job in jobs))
        for buckets in engine._bucket_lists
        for bucket in buckets
        for team, jobs in itertools.groupby(bucket.jobs, lambda job: job.team)
        if team
    }


def make(layout: str, shapes: Shapes, fields: dict[str, Any]) -> tuple[Any, AMO]:
    model = models.make_model(layout, shapes)
    group = dist.group.WORLD if layout == "plain" else None
    config = AMOConfig(**fields)
    return model, AMO(param_groups(model), lr=LR, config=config, process_group=group)


def train(
    rank: int, world_size: int, layout: str, shapes: Shapes, fields: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any], list[Shared]]:
    """Parameters, control state, and what was shared at each step."""
    shared = []
    with free_sends():
        model, optimizer = make(layout, shapes, fields)
        for step in range(1, STEPS + 1):
            models.set_gradients(model, SEED, step)
            optimizer.step()
            shared.append(shared_by(optimizer))
    params = {name: models.whole(param) for name, param in model.named_parameters()}
    return params, optimizer.control_state_dict(), shared


def twin_of(shapes: Shapes, fields: dict[str, Any]) -> Oracle:
    params = {name: models.initial(name, shape) for name, shape in shapes.items()}
    types = {name: kind for name, kind in TYPES.items() if name in shapes}
    twin = Oracle(params, types, AMOConfig(**fields), lr=LR, weight_decay=0.1)
    for step in range(1, STEPS + 1):
        twin.step({n: models.gradient(SEED, step, n, shape) for n, shape in shapes.items()})
    return twin


CASES = [
    pytest.param("plain", 4, 2, id="ddp-4"),
    pytest.param("fsdp", 3, 2, id="fsdp-3"),
    pytest.param("fsdp", 4, 4, id="fsdp-4"),
    pytest.param("hsdp", 4, 4, id="hsdp-2x2"),
    pytest.param("tp_fsdp", 4, 4, id="tp-2-fsdp-2"),
]


@pytest.mark.parametrize(("layout", "world_size", "max_team"), CASES)
def test_every_layout_equals_the_twin_to_rounding(
    run_on: Ranks, layout: str, world_size: int, max_team: int
) -> None:
    shapes = EVEN if layout == "tp_fsdp" else UNEVEN
    if world_size == 3:  # where only a matrix that outweighs the others is worth sharing
        shapes = {**shapes, "layers.0.attention.wo.weight": (19, 21)}
    fields = {**FIELDS, "ns_dtype": "float32", "max_team": max_team}
    twin = twin_of(shapes, fields)
    results = run_on(world_size)(train, layout, shapes, fields)
    for params, control, shared in results:
        assert control == results[0][1]
        plan = control["policy"]["plan"]
        assert plan["allocation"] == [twin.allocation[kind] for kind in twin.order]
        for name, expected in twin.params.items():
            # Some 1e-5 of an orthogonal matrix, times lr and update_scale: 1e-8 a step.
            torch.testing.assert_close(params[name], expected, rtol=1e-5, atol=1e-6)
        # What is observed, or checked by the guard, is shared as ever: it travels once more.
        assert all(step == shared[0] for step in shared[:4])
    sizes = {len(team) for *_, shared in results for step in shared for team, _ in step}
    assert 2 in sizes
    assert max(sizes) <= max_team


def train_stages(rank: int, world_size: int) -> tuple[dict[str, Tensor], list[Shared]]:
    """Two stages of a pipeline, each sharded over two ranks that know nothing of the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    with free_sends():
        model = models.plain_model(stage_shapes(rank // 2))
        for layer in model.get_submodule("layers").children():
            fully_shard(layer, mesh=mesh["dp"])
        config = AMOConfig(**FIELDS, ns_dtype="float32", max_team=2)
        optimizer = AMO(param_groups(model), lr=LR, config=config)
        shared = []
        for step in range(1, STEPS + 1):
            models.set_gradients(model, SEED, step)
            optimizer.step()
            shared.append(shared_by(optimizer))
    return {name: models.whole(param) for name, param in model.named_parameters()}, shared


def stage_shapes(stage: int) -> Shapes:
    """Of the second stage one matrix fewer: stages go through unlike schedules and exchanges."""
    some = list(UNEVEN.items())[stage:]
    return {name.replace("layers.0", f"layers.{stage}"): shape for name, shape in some}


def test_stages_of_a_pipeline_share_apart(run_on: Ranks) -> None:
    shapes = stage_shapes(0) | stage_shapes(1)
    fields = {**FIELDS, "ns_dtype": "float32"}
    params = {name: models.initial(name, shape) for name, shape in shapes.items()}
    types = {name: kind for name, kind in models.types().items() if name in shapes}
    twin = Oracle(params, types, AMOConfig(**fields), lr=LR, weight_decay=0.1)
    for step in range(1, STEPS + 1):
        twin.step({n: models.gradient(SEED, step, n, shape) for n, shape in shapes.items()})
    for rank, (found, shared) in enumerate(run_on(4)(train_stages)):
        teams = {team for step in shared for team, _ in step}
        assert teams == {((0, 1), (2, 3))[rank // 2]}
        for name, value in found.items():
            torch.testing.assert_close(value, twin.params[name], rtol=1e-5, atol=1e-6)


def resume(rank: int, world_size: int, at: int) -> tuple[bool, list[Shared], list[Shared]]:
    """Whether a run that went on from saved state ends in the same bits; what each shared."""
    fields = {**FIELDS, "max_team": 4}
    shared: list[list[Shared]] = [[], []]
    with free_sends():
        model, optimizer = make("fsdp", UNEVEN, fields)
        for step in range(1, STEPS + 1):
            models.set_gradients(model, SEED, step)
            optimizer.step()
            shared[0].append(shared_by(optimizer))
            if step == at:
                saved = models.through_a_file(optimizer.state_dict(), weights_only=False)
                held = {n: p.to_local().clone() for n, p in model.named_parameters()}
        again, other = make("fsdp", UNEVEN, fields)
        with torch.no_grad():
            for name, param in again.named_parameters():
                param.to_local().copy_(held[name])
        other.load_state_dict(saved)
        for step in range(at + 1, STEPS + 1):
            models.set_gradients(again, SEED, step)
            other.step()
            shared[1].append(shared_by(other))
    pairs = zip(model.parameters(), again.parameters(), strict=True)
    return all(torch.equal(a.to_local(), b.to_local()) for a, b in pairs), *shared


@pytest.mark.parametrize("at", [3, 5])
def test_a_run_that_goes_on_gives_the_same_bits(run_on: Ranks, at: int) -> None:
    """Before the plan, and in the transition: teams follow from the step alone."""
    results = run_on(4)(resume, at)
    for is_equal, shared, again in results:
        assert is_equal
        assert again == shared[at:]
    assert any(any(again) for *_, again in results)


def diverge(rank: int, world_size: int) -> tuple[Shared, bool, list[str]]:
    """One step of a schedule that overflows: what was shared, and whether parameters decayed."""
    shapes = {name: UNEVEN[name] for name in ("layers.0.attention.wq.weight",)}
    with free_sends():
        model = models.make_model("fsdp", shapes)
        schedule = Schedule(((3e38, 3e38, 3e38),), 1.0)
        config = MuonConfig(max_team=4, ns_dtype="float32")
        optimizer = Muon(param_groups(model), lr=0.5, schedule=schedule, config=config)
        before = [param.to_local().clone() for param in model.parameters()]
        models.set_gradients(model, SEED, 1)
        optimizer.step()
        after = [param.to_local() for param in model.parameters()]
        decayed = all(
            torch.equal(a * (1 - 0.5 * 0.1), b) for a, b in zip(before, after, strict=True)
        )
        with pytest.raises(NonFiniteUpdateError) as raised:
            optimizer.check_last_update()
    return shared_by(optimizer), decayed, [str(raised.value)]


def test_an_update_that_overflows_is_left_out_on_all_members(run_on: Ranks) -> None:
    for shared, decayed, (error,) in run_on(4)(diverge):
        assert shared == {((0, 1, 2, 3), ("layers.0.attention.wq.weight",))}
        assert decayed
        assert error.startswith("layers.0.attention.wq.weight: the last update")


SHARED = MuonConfig(max_team=2, ownership="balanced")


def share_on_some_ranks(rank: int, world_size: int) -> str:
    """Two of three ranks would share a matrix, and the job has a fourth."""
    mesh = DeviceMesh("cpu", [0, 1, 2])
    if rank == 3:
        return ""
    name = "layers.0.attention.wq.weight"
    model = models._fully_shard(models.plain_model({name: EVEN[name]}), mesh)
    optimizer = Muon(param_groups(model), lr=LR, config=SHARED)
    models.set_gradients(model, SEED, 1)
    before = [models.whole(param).clone() for param in model.parameters()]
    try:
        with free_sends():
            optimizer.step()
    except ValueError as error:
        assert all(map(torch.equal, before, map(models.whole, model.parameters())))
        return str(error)
    return "no error"


def test_a_team_on_some_ranks_of_a_job_needs_a_group(run_on: Ranks) -> None:
    # Fresh ones: what other cases have made would do.
    first, *others, outside = run_on(4, timeout=60.0, fresh=True)(share_on_some_ranks)
    assert others == [first, first]
    assert outside == ""
    assert re.fullmatch(
        r"process_group: found no group of ranks \[0, 1\], which share a matrix, in a world of "
        r"ranks \[0, 1, 2\], expected one .*: have all ranks of the job make it before the first "
        r"step, dist\.new_group\(\[0, 1\]\)",
        first,
    )
