"""Every layout against the single-process twin: the same bits, the same plan."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard

from amo_dist import AMO, AMOConfig, param_groups
from amo_dist.distributed.layout import mesh_layout
from amo_dist.engine import step as engine_step
from amo_dist.operators.views import Fused
from amo_dist.schedule.plan import Plan
from tests import runs
from tests.distributed import models
from tests.distributed.harness import Ranks
from tests.layouts import cut_view, local_tensor
from tests.operators import classify
from tests.oracle import Oracle

LR, WEIGHT_DECAY, STEPS, SEED = 3e-3, 0.1, 8, 7
FIELDS = runs.PHASES | {
    "transition_steps": 2,
    # Its own products would count as those of training.
    "ns_guard_every": 0,
    # Small buckets: the tiny matrices of these tests fill several.
    "bucket_bytes": 256,
}
PAPER, WIDE = {"planner": "paper"}, {"ns_dtype": "float32"}
BALANCED = {"ownership": "balanced"}
Shapes = dict[str, tuple[int, ...]]
PATTERNS = {
    # Uneven grouped-query attention, in three pieces and interleaved by group.
    r".*attention\.wqkv\.weight": Fused((("attn_q", 6), ("attn_k", 3), ("attn_v", 3))),
    r".*attention\.woven\.weight": Fused((("attn_q", 8), ("attn_k", 4), ("attn_v", 2)), groups=2),
    r".*\.conv\.weight": "conv",
}
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


def gradient(step: int, name: str, shape: tuple[int, ...]) -> Tensor:
    if len(shape) != 3:
        flat = (shape[0], math.prod(shape[1:])) if len(shape) == 4 else shape
        return models.gradient(SEED, step, name, flat).view(shape)
    parts = [models.gradient(SEED, step, f"{name}[{e}]", shape[1:]) for e in range(shape[0])]
    # Harder for one operator type than for the others, or the plan would be the uniform one.
    decay = {"w1": 0.0, "w2": 3.0, "w3": 0.5}[name[-2:]]
    rows = torch.arange(shape[1], dtype=torch.float32)
    return torch.stack(parts) * torch.exp(-decay * rows).unsqueeze(-1)


def views_of(name: str, shape: tuple[int, ...]) -> Any:
    patterns = {p: t for p, t in PATTERNS.items() if p.split(".")[-2].strip("\\") in name}
    return classify(name, shape, patterns)


def by_matrix(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The tensors of the twin: each matrix is one, and so is what goes to AdamW."""
    views = views_of(name, tuple(tensor.shape))
    if views is None:
        return {name: tensor.clone()}
    if tensor.dim() == 4:
        return {name: tensor.flatten(1)}
    return {name + view.suffix: cut_view(view, tensor).clone() for view in views}


def make_twin(shapes: Shapes, fields: dict[str, Any]) -> Oracle:
    """The twin before its first step."""
    params: dict[str, Tensor] = {}
    types: dict[str, str] = {}
    for name, shape in shapes.items():
        params |= by_matrix(name, models.initial(name, shape))
        for view in views_of(name, shape) or ():
            types[name + view.suffix] = view.operator_type
    return Oracle(params, types, AMOConfig(**fields), lr=LR, weight_decay=WEIGHT_DECAY)


def gradients(step: int, shapes: Shapes) -> dict[str, Tensor | None]:
    """What the twin takes in a step."""
    grads: dict[str, Tensor | None] = {}
    for name, shape in shapes.items():
        grads |= by_matrix(name, gradient(step, name, shape))
    return grads


def set_gradients(model: nn.Module, step: int) -> None:
    """The same gradients, in the placements of the parameters."""
    for name, param in model.named_parameters():
        param.grad = models.place_like(gradient(step, name, tuple(param.shape)), param)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a rank holds after the run."""

    whole: dict[str, Tensor]
    local: dict[str, Tensor]
    control: dict[str, Any]
    sent: float
    num_orthogonalized: int


def train(
    rank: int, world_size: int, build: Callable[[], nn.Module], fields: dict[str, Any]
) -> Outcome:
    model = build()
    groups = param_groups(model, patterns=PATTERNS, allow_unused=True)
    optimizer = AMO(
        groups,
        lr=LR,
        weight_decay=WEIGHT_DECAY,
        config=AMOConfig(**fields),
        process_group=dist.group.WORLD if build is build_replicas and world_size > 1 else None,
    )
    counted = [0]
    original = engine_step.orthogonalize

    def counting(x: Tensor, *args: Any, **options: Any) -> Tensor:
        counted[0] += len(x) if x.dim() == 3 else 1
        return original(x, *args, **options)

    with mock.patch.object(engine_step, "orthogonalize", counting):
        for step in range(1, STEPS + 1):
            set_gradients(model, step)
            optimizer.step()
    return Outcome(
        whole=runs.weights(model),
        local={
            name: (param.to_local() if isinstance(param, DTensor) else param).detach().clone()
            for name, param in model.named_parameters()
        },
        control=optimizer.control_state_dict(),
        sent=optimizer.metrics()["exchange/sent_bytes"],
        num_orthogonalized=counted[0],
    )


def check(results: list[Outcome], shapes: Shapes, fields: dict[str, Any] = FIELDS) -> None:
    twin = make_twin(shapes, fields)
    for step in range(1, STEPS + 1):
        twin.step(gradients(step, shapes))
    seen: set[str] = set()
    for result in results:
        assert result.control == results[0].control
        for name, tensor in result.whole.items():
            for key, matrix in by_matrix(name, tensor).items():
                assert torch.equal(matrix, twin.params[key]), key
                seen.add(key)
    assert seen == set(twin.params)
    assert twin.source is not None
    assert Plan.from_dict(results[0].control["source"]["plan"]) == twin.source.plan
    assert len(set(twin.source.plan.allocation)) > 1  # else a uniform plan would pass


def num_matrices(shapes: Shapes) -> int:
    return sum(len(views_of(name, shape) or ()) for name, shape in shapes.items())


# ------------------------------------------------------------------ builders, run on the ranks


def place(shapes: Shapes, placements: dict[str, Any], mesh: Any) -> dict[str, Tensor]:
    """Parameters on one mesh; the first part of a name that is found gives the placements."""
    tensors: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        found = next(value for key, value in placements.items() if key in name)
        whole = models.initial(name, shape)
        local = local_tensor(mesh_layout(shape, mesh.mesh, found), whole, dist.get_rank())
        tensor = DTensor.from_local(
            local.contiguous().to(mesh.device_type),
            mesh,
            found,
            run_check=False,
            shape=torch.Size(shape),
            stride=whole.stride(),
        )
        tensors[name] = nn.Parameter(tensor)
    return tensors


def world_mesh(device: str = "cpu") -> Any:
    return init_device_mesh(device, (dist.get_world_size(),))


def build_cut(shapes: Shapes, dim: int, device: str = "cpu") -> nn.Module:
    """All tensors are cut on one dim; norms, which may not have it, are replicas."""
    norm = [Shard(0)] if dim == 0 else [Replicate()]
    return models.build(place(shapes, {"norm": norm, "": [Shard(dim)]}, world_mesh(device)))


def build_experts_0(device: str = "cpu") -> nn.Module:
    return build_cut(EXPERTS, 0, device)


def build_experts_and_dense() -> nn.Module:
    experts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "fsdp"))
    found = place(EXPERTS, {"norm": [Replicate(), Shard(0)], "": [Shard(0), Shard(1)]}, experts)
    return models.build(found | place(DENSE, {"": [Shard(0)]}, world_mesh()))


def build_joint() -> nn.Module:
    """Context parallelism: FSDP over data and context ranks flattened into one axis."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    joint = mesh["dp", "cp"]._flatten("dp_cp")
    return models.shard(models.plain_model(WHOLE), joint)


def build_replicas() -> nn.Module:
    return models.plain_model(WHOLE)


def build_offloaded() -> nn.Module:
    policy = CPUOffloadPolicy(pin_memory=False)
    return models.shard(models.plain_model(WHOLE), world_mesh(), offload_policy=policy)


def build_stage(device: str = "cpu") -> nn.Module:
    """A stage to each rank, with plain tensors."""
    return models.plain_model(STAGES[dist.get_rank()], device)


def build_sharded_stage(device: str = "cpu") -> nn.Module:
    """A stage to each half of the ranks, sharded in it."""
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("pp", "dp"))
    stage = STAGES[mesh.get_local_rank("pp")]
    return models.build(place(stage, {"": [Shard(0)]}, mesh["dp"]))


# ------------------------------------------------------------------ tests

CASES = [
    pytest.param(build_replicas, 1, WHOLE, WIDE, id="one-process"),
    pytest.param(build_replicas, 3, WHOLE, PAPER, id="ddp-3"),
    pytest.param(partial(models.make_model, "fsdp", WHOLE), 2, WHOLE, {}, id="fsdp-2"),
    pytest.param(partial(models.make_model, "fsdp", WHOLE), 3, WHOLE, PAPER | WIDE, id="fsdp-3"),
    pytest.param(partial(models.make_model, "fsdp", WHOLE), 3, WHOLE, BALANCED, id="balanced-3"),
    pytest.param(partial(models.make_model, "fsdp", WHOLE), 4, WHOLE, {}, id="fsdp-4"),
    pytest.param(partial(models.make_model, "hsdp", WHOLE), 4, WHOLE, PAPER, id="hsdp-2x2"),
    pytest.param(partial(models.make_model, "tp", WHOLE), 2, WHOLE, WIDE, id="tp-2"),
    pytest.param(partial(models.make_model, "tp", WHOLE), 3, WHOLE, PAPER, id="tp-3"),
    pytest.param(partial(models.make_model, "tp_fsdp", EVEN), 4, EVEN, {}, id="tp-2-fsdp-2"),
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
]


@pytest.mark.parametrize(("build", "world_size", "shapes", "fields"), CASES)
def test_every_layout_equals_the_twin_bit_for_bit(
    run_on: Ranks,
    build: Callable[[], nn.Module],
    world_size: int,
    shapes: Shapes,
    fields: dict[str, Any],
) -> None:
    fields = FIELDS | fields
    results = run_on(world_size)(train, build, fields)
    check(results, shapes, fields)
    # Each matrix once a step, by one rank of the world.
    total = sum(result.num_orthogonalized for result in results)
    assert total == STEPS * num_matrices(shapes)


def test_experts_sharded_on_their_first_dim_send_nothing(run_on: Ranks) -> None:
    results = run_on(2)(train, build_experts_0, FIELDS)
    check(results, EXPERTS)
    assert [result.sent for result in results] == [0, 0]


@pytest.mark.slow
def test_replicas_of_fsdp_over_tensor_parallelism_equal_the_twin_bit_for_bit(
    run_on: Ranks,
) -> None:
    results = run_on(8, fresh=True)(train, partial(models.make_model, "hsdp_tp", EVEN), FIELDS)
    check(results, EVEN)
    total = sum(result.num_orthogonalized for result in results)
    assert total == STEPS * num_matrices(EVEN)
    # Both replicas get results from owners of either.
    for first, second in zip(results[:4], results[4:], strict=True):
        assert first.sent
        for name, local in first.local.items():
            assert torch.equal(local, second.local[name])
