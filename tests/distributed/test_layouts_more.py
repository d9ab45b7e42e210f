"""Every layout against the single-process twin: the same bits, the same plan."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import Replicate, Shard

from amo_dist.schedule.plan import Plan
from tests import runs
from tests.distributed import models
from tests.distributed.harness import Ranks
from tests.distributed.twin import Shapes
from tests.fuzz.cases import Case, check, train

FIELDS = runs.PHASES | {
    "transition_steps": 2,
    "ns_guard_every": 0,
    # Small buckets: the tiny matrices of these tests fill several.
    "bucket_bytes": 256,
}
PAPER, WIDE = {"planner": "paper"}, {"ns_dtype": "float32"}
ROUND_ROBIN = {"ownership": "round_robin"}
FUSED: Shapes = {
    "layers.0.attention.wqkv.weight": (12, 5),
    "layers.1.attention.woven.weight": (14, 5),
    "layers.1.attention.wo.weight": (5, 8),
    "h.2.attn.c_attn.weight": (5, 15),
    "h.2.attn.c_proj.weight": (5, 5),
    "norm.weight": (5,),
}
EXPERTS: Shapes = {
    "layers.0.moe.experts.w1": (4, 6, 5),
    "layers.0.moe.experts.w2": (4, 5, 6),
    "layers.0.moe.experts.w3": (4, 6, 5),
    "norm.weight": (5,),
}
DENSE: Shapes = {
    "layers.0.attention.wq.weight": (7, 5),
    "layers.0.attention.wo.weight": (5, 7),
    "tok_embeddings.weight": (9, 5),
}
CONVOLUTIONS: Shapes = {
    "layers.0.conv.weight": (7, 3, 3, 2),
    "layers.1.conv.weight": (4, 5, 1, 1),
    "layers.1.attention.wq.weight": (7, 5),
    "stem.weight": (7, 3, 3, 2),
}
WHOLE: Shapes = models.shapes()
EVEN: Shapes = models.shapes(models.EVEN_SHAPES)  # FSDP over TP: torch pads nothing there
STAGES: tuple[Shapes, Shapes] = (
    {
        "tok_embeddings.weight": (9, 5),
        "layers.0.attention.wq.weight": (7, 5),
        "layers.0.attention.wo.weight": (5, 7),
    },
    {
        "layers.1.attention.wq.weight": (7, 5),
        "layers.1.feed_forward.w2.weight": (5, 9),  # a type that this stage alone has
        "layers.1.feed_forward.w1.weight": (9, 5),
        "output.weight": (9, 5),
    },
)


# ------------------------------------------------------------------ builders, run on the ranks


def build_cut(shapes: Shapes, dim: int, device: str = "cpu") -> nn.Module:
    """All tensors are cut on one dim; norms, which may not have it, are replicas."""
    norm = [Shard(0)] if dim == 0 else [Replicate()]
    return models.build(
        models.place_all(shapes, {"norm": norm, "": [Shard(dim)]}, models.world_mesh(device))
    )


def build_experts_0(device: str = "cpu") -> nn.Module:
    return build_cut(EXPERTS, 0, device)


def build_experts_and_dense() -> nn.Module:
    experts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "fsdp"))
    found = models.place_all(
        EXPERTS, {"norm": [Replicate(), Shard(0)], "": [Shard(0), Shard(1)]}, experts
    )
    return models.build(found | models.place_all(DENSE, {"": [Shard(0)]}, models.world_mesh()))


def build_joint() -> nn.Module:
    """Context parallelism: FSDP over data and context ranks flattened into one axis."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    joint = mesh["dp", "cp"]._flatten("dp_cp")
    return models.shard(models.plain_model(WHOLE), joint)


def build_replicas() -> tuple[nn.Module, Any]:
    return models.plain_model(WHOLE), dist.group.WORLD if dist.get_world_size() > 1 else None


def build_offloaded() -> nn.Module:
    policy = CPUOffloadPolicy(pin_memory=False)
    return models.shard(models.plain_model(WHOLE), models.world_mesh(), offload_policy=policy)


def build_stage(device: str = "cpu") -> nn.Module:
    """A stage to each rank, with plain tensors."""
    return models.plain_model(STAGES[dist.get_rank()], device)


def build_sharded_stage(device: str = "cpu") -> nn.Module:
    """A stage to each half of the ranks, sharded in it."""
    mesh = init_device_mesh(device, (2, 1, 2), mesh_dim_names=("pp", "replicate", "shard"))
    stage = STAGES[mesh.get_local_rank("pp")]
    placements = {"": [Replicate(), Shard(0)]}
    return models.build(models.place_all(stage, placements, mesh["replicate", "shard"]))


def build_replicated_stage() -> tuple[nn.Module, Any]:
    """A stage to each half of the ranks, replicas in it: plain tensors, as under DDP."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    return models.plain_model(STAGES[mesh.get_local_rank("pp")]), mesh["dp"]


def build_uneven_stage() -> tuple[nn.Module, Any]:
    """A stage on two ranks, and one on the third."""
    meshes = [DeviceMesh("cpu", ranks) for ranks in ([0, 1], [2])]
    stage = dist.get_rank() // 2
    return models.build(
        models.place_all(STAGES[stage], {"": [Shard(0)]}, meshes[stage])
    ), dist.group.WORLD


# ------------------------------------------------------------------ tests

CASES = [
    pytest.param(build_replicas, 1, WHOLE, WIDE, id="one-process"),
    pytest.param(build_replicas, 3, WHOLE, PAPER, id="ddp-3"),
    pytest.param("fsdp", 2, WHOLE, {}, id="fsdp-2"),
    pytest.param("fsdp", 3, WHOLE, PAPER | WIDE, id="fsdp-3"),
    pytest.param("fsdp", 3, WHOLE, ROUND_ROBIN, id="dealt-3"),
    pytest.param("fsdp", 4, WHOLE, {}, id="fsdp-4"),
    pytest.param("hsdp", 4, WHOLE, PAPER, id="hsdp-2x2"),
    pytest.param("tp", 2, WHOLE, WIDE, id="tp-2"),
    pytest.param("tp", 3, WHOLE, PAPER, id="tp-3"),
    pytest.param("tp_fsdp", 4, EVEN, {}, id="tp-2-fsdp-2"),
    pytest.param(
        *("hsdp_tp", 8, EVEN, {}),
        id="tp-2-hsdp-2x2",
        marks=pytest.mark.slow,
    ),
    pytest.param(partial(build_cut, FUSED, 0), 1, FUSED, {}, id="fused-one-process"),
    pytest.param(partial(build_cut, FUSED, 0), 3, FUSED, {}, id="fused-fsdp-3"),
    pytest.param(partial(build_cut, FUSED, 1), 2, FUSED, {}, id="fused-columns-2"),
    pytest.param(partial(build_cut, EXPERTS, 1), 3, EXPERTS, {}, id="experts-dim-1"),
    pytest.param(partial(build_cut, EXPERTS, 2), 3, EXPERTS, {}, id="experts-dim-2"),
    pytest.param(build_experts_and_dense, 4, EXPERTS | DENSE, {}, id="experts-and-dense"),
    pytest.param(partial(build_cut, CONVOLUTIONS, 0), 1, CONVOLUTIONS, {}, id="convolutions"),
    pytest.param(partial(build_cut, CONVOLUTIONS, 0), 3, CONVOLUTIONS, {}, id="convolutions-3"),
    pytest.param(partial(build_cut, CONVOLUTIONS, 1), 2, CONVOLUTIONS, {}, id="convolutions-dim-1"),
    pytest.param(build_joint, 4, WHOLE, {}, id="joint-data-and-context"),
    pytest.param(build_offloaded, 2, WHOLE, {}, id="offloaded"),
    pytest.param(build_stage, 2, STAGES[0] | STAGES[1], {}, id="stages"),
    pytest.param(build_sharded_stage, 4, STAGES[0] | STAGES[1], {}, id="sharded-stages"),
    pytest.param(build_replicated_stage, 4, STAGES[0] | STAGES[1], {}, id="replicated-stages"),
    pytest.param(build_uneven_stage, 3, STAGES[0] | STAGES[1], {}, id="uneven-stages"),
]


def case_of(layout: Any, world_size: int, shapes: Shapes, fields: dict[str, Any]) -> Case:
    return Case(world_size, layout, "AMO", dict(shapes), "float32", FIELDS | fields, True, steps=8)


@pytest.mark.parametrize(("layout", "world_size", "shapes", "fields"), CASES)
def test_every_layout_equals_the_twin_bit_for_bit(
    run_on: Ranks, layout: Any, world_size: int, shapes: Shapes, fields: dict[str, Any]
) -> None:
    control = check(case_of(layout, world_size, shapes, fields), run_on)
    # Else a uniform plan would pass.
    assert len(set(Plan.from_dict(control["source"]["plan"]).allocation)) > 1


def test_experts_sharded_on_their_first_dim_send_nothing(run_on: Ranks) -> None:
    case = case_of(build_experts_0, 2, EXPERTS, {})
    check(case, run_on)
    assert [sent for *_, sent in run_on(2)(train, case)] == [0, 0]


def send(rank: int, world_size: int, layout: str) -> tuple[list[float], int]:
    """Bytes that this rank sends in a step, and in one that observes; elements observed."""
    model, optimizer = runs.make(layout, shapes=EVEN, ns_dtype="bfloat16", bucket_bytes=64)
    sent = []
    for step in (1, 2):
        sampled = optimizer.source.sample(step) if step > 1 else ()
        runs.train(model, optimizer, step, step)
        sent.append(optimizer.metrics()["exchange/sent_bytes"])
    return sent, sum(math.prod(EVEN[name]) for name in sampled)


@pytest.mark.parametrize(
    ("layout", "world_size", "held", "replicas"),
    [("fsdp", 2, 1 / 2, 1), ("hsdp", 4, 1 / 2, 2), ("tp_fsdp", 4, 1 / 4, 1), ("plain", 3, 1, 3)],
)
def test_a_step_sends_each_matrix_once_there_and_once_back(
    run_on: Ranks, layout: str, world_size: int, held: float, replicas: int
) -> None:
    """But for what its owner holds; in bfloat16, and in float32 what is only measured.

    What goes along replicas is padded to the longest part, here by less than the largest matrix.
    """
    results = run_on(world_size)(send, layout)
    plain, observing = (sum(sent[step] for sent, _ in results) for step in range(2))
    size = sum(math.prod(EVEN[name]) for name in models.types())
    padding = plain - 2 * size * (1 - held + replicas - held)
    assert 0 <= padding <= 2 * (replicas - 1) * world_size * max(map(math.prod, EVEN.values()))
    assert observing == plain + 4 * results[0][1] * (1 - held)
