"""The work of all ranks of a large model, and what one of them asks of its host.

``python -m benchmarks.scale`` lays models out over up to 1,024 ranks, as FSDP2 and expert
parallelism shard them. From these layouts follow the Newton-Schulz work of each rank and the bytes
of the busiest one. Then one rank is simulated, without the others: it has the true rows of its
shards, of which columns are left out, collectives move nothing, and Newton-Schulz is left out. Only
the times of the host mean something there.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from amo_dist import AMO, AMOConfig, MuonConfig, param_groups
from amo_dist.distributed.layout import Matrix, make_matrix, mesh_layout
from amo_dist.engine import step, world
from amo_dist.schedule.types import MatrixInfo
from benchmarks.launches import transfer
from benchmarks.measure import report
from benchmarks.shapes import MODELS, shapes_by_name
from benchmarks.step_cost import StepCost
from tests.distributed.models import build
from torchtitan_ext.tools.shapes import DecoderShape

OWNERSHIPS = ("round_robin", "balanced")
DENSE: Mapping[str, DecoderShape] = {
    "1.7B": MODELS["Qwen3-1.7B"],
    "8B": DecoderShape(32, 4096, 14336, 32, 8),
    "70B": DecoderShape(80, 8192, 28672, 64, 8),
    "405B": DecoderShape(126, 16384, 53248, 128, 8),
}
"""Qwen3-1.7B, Llama-3.1-8B, 70B and 405B."""
CASES = (("1.7B", 32), ("1.7B", 64), ("8B", 64), ("70B", 256), ("405B", 256), ("671B", 1024))
"""Models, and ranks."""
EXPERT_RANKS = 64
"""Ranks that share the experts of a layer; the others shard the rows of each."""
FEWER_COLUMNS = 64
BASE_STEPS = 5
OBSERVED_AT, LOCKED_AT, NUM_LOCKED = 2, 17, 10
"""Steps of a simulated run: of the observation, of the lock, and after it."""


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    names = [f"{name}:{ranks}" for name, ranks in CASES]
    parser.add_argument("--cases", nargs="+", default=names, metavar="MODEL:RANKS")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(args)
    torch.set_num_threads(1)
    rows = []
    for case in options.cases:
        name, _, ranks = case.partition(":")
        rows.append({"model": name, "ranks": int(ranks), **work(name, int(ranks))})
        rows[-1] |= host(name, int(ranks))
    report("scale", rows, options.output, vars(options))
    return 0


# ---------------------------------------------------------------- layouts


def shapes_of(name: str) -> dict[str, tuple[int, ...]]:
    """Shapes of all parameters with matrices, under torchtitan's names."""
    return {**shapes_by_name(DENSE[name])} if name in DENSE else _deepseek_v3()


def _deepseek_v3() -> dict[str, tuple[int, ...]]:
    dim, heads, query, latent, experts = 7168, 128, 1536, 512, 256
    attention = {
        "wq_a": (query, dim),
        "wq_b": (heads * 192, query),
        "wkv_a": (latent + 64, dim),
        "wkv_b": (heads * 256, latent),
        "wo": (dim, heads * 128),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(61):
        block = f"layers.{layer}"
        shapes |= {f"{block}.attention.{key}.weight": shape for key, shape in attention.items()}
        dense, width = ("feed_forward", 18432) if layer < 3 else ("moe.shared_experts", 2048)
        mlp = {"w1": (width, dim), "w3": (width, dim), "w2": (dim, width)}
        shapes |= {f"{block}.{dense}.{key}.weight": shape for key, shape in mlp.items()}
        if layer >= 3:
            shapes |= {f"{block}.moe.experts.{key}": (experts, *mlp[key]) for key in mlp}
    return shapes


def placement(shape: Sequence[int], ranks: int) -> tuple[tuple[int, ...], tuple[Shard, ...]]:
    """Shape of the mesh and placements of a parameter: FSDP2, for experts over their own ranks."""
    if len(shape) == 2:
        return (ranks,), (Shard(0),)
    return (ranks // EXPERT_RANKS, EXPERT_RANKS), (Shard(1), Shard(0))


def lay_out(name: str, ranks: int) -> tuple[list[MatrixInfo], list[Matrix]]:
    """All matrices of a model, and which rank holds what of them."""
    registry, matrices = [], []
    shapes = shapes_of(name)
    with torch.device("meta"):
        model = build({key: torch.empty(shape) for key, shape in shapes.items()})
    (group,) = param_groups(model)
    for index, (key, views) in enumerate(group["matrix_views"].items()):
        mesh, placements = placement(shapes[key], ranks)
        layout = mesh_layout(shapes[key], torch.arange(ranks).view(mesh), placements)
        for view in views:
            matrix = make_matrix(key + view.suffix, layout, index, view.boxes, view.dim)
            matrices.append(matrix)
            registry.append(MatrixInfo(matrix.name, matrix.shape, view.operator_type))
    return registry, matrices


def work(name: str, ranks: int, steps: Mapping[str, int] | None = None) -> dict[str, float]:
    """Newton-Schulz flops of the busiest rank over the mean, and its buffers.

    Args:
        name: Model.
        ranks: Ranks.
        steps: Newton-Schulz steps by operator type; None for as many of each.
    """
    registry, matrices = lay_out(name, ranks)
    steps = steps or dict.fromkeys({info.operator_type for info in registry}, BASE_STEPS)
    row: dict[str, float] = {"matrices": len(matrices)}
    for ownership in OWNERSHIPS:
        config = MuonConfig(ownership=ownership)
        cost = StepCost(registry, matrices, steps, ranks, config=config)
        row[f"greatest/mean, {ownership}"] = (cost.flops.max() / cost.flops.mean()).item()
        row[f"buffers MiB, {ownership}"] = round(cost.memory()[0] / 2**20)
    return row


# ---------------------------------------------------------------- one rank


def host(name: str, ranks: int) -> dict[str, float]:
    """Times of the host of rank 0, which takes steps without the others.

    Returns:
        Seconds of this process to construct the optimizer, and of its first step; megabytes of the
        text that ranks compare then; milliseconds of a step after the lock, and of the schedules
        that a step of the transition makes anew.
    """
    config = AMOConfig(
        observe_until=OBSERVED_AT,
        observe_every=OBSERVED_AT,
        sample_size=1,
        transition_steps=LOCKED_AT - OBSERVED_AT,
        ns_dtype="bfloat16",
        ns_guard_every=0,
        bucket_bytes=MuonConfig().bucket_bytes // FEWER_COLUMNS,
    )
    sizes: list[int] = []
    seconds: list[float] = []
    decisions: list[float] = []

    def gather_json(value: Any, group: Any) -> dict[int, Any]:
        sizes.append(len(json.dumps(value)))
        return gather(value, group)

    gather, decide = world.gather_json, AMO._decide
    logging.disable(logging.WARNING)  # of matrices that the others would have measured
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        groups = param_groups(make_module(name, ranks))
        with (
            mock.patch.object(world, "gather_json", gather_json),
            mock.patch.object(AMO, "_decide", lambda *args: timed(decisions, decide, *args)),
            mock.patch.object(step, "orthogonalize", _as_it_is),
            mock.patch.object(dist, "all_to_all_single", transfer),
        ):
            optimizer = timed(seconds, AMO, groups, lr=1e-3, config=config)
            for _ in range(LOCKED_AT + NUM_LOCKED):
                timed(seconds, optimizer.step)
    finally:
        logging.disable(logging.NOTSET)
        dist.destroy_process_group()
    return {
        "construction s": seconds[0],
        "first step s": seconds[1],
        "text MB": max(sizes) / 1e6,
        # The first locked step assigns new owners.
        "locked step ms": 1e3 * statistics.median(seconds[LOCKED_AT + 1 :]),
        "new schedules ms": 1e3 * statistics.median(decisions[OBSERVED_AT : LOCKED_AT - 1]),
    }


def timed(seconds: list[float], call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call, and note the seconds of this process."""
    start = time.process_time()
    result = call(*args, **options)
    seconds.append(time.process_time() - start)
    return result


def make_module(name: str, ranks: int) -> nn.Module:
    """The shards of rank 0 with gradients; most columns of each matrix are left out."""

    def sharded(shape: tuple[int, ...]) -> DTensor:
        shape = (*shape[:-1], shape[-1] // FEWER_COLUMNS)
        sizes, placements = placement(shape, ranks)
        mesh = meshes.get(sizes) or init_device_mesh("cpu", sizes)
        meshes[sizes] = mesh
        local = torch.zeros(mesh_layout(shape, mesh.mesh, placements).local_shape(0))
        strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        size = torch.Size(shape)
        return DTensor.from_local(local, mesh, placements, shape=size, stride=strides)

    meshes: dict[tuple[int, ...], Any] = {}
    module = build({key: sharded(shape) for key, shape in shapes_of(name).items()})
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return module


def _as_it_is(x: Tensor, *_: object, dtype: torch.dtype, **__: object) -> Tensor:
    """Stands for Newton-Schulz."""
    return x.to(dtype, copy=True)


if __name__ == "__main__":
    raise SystemExit(main())
