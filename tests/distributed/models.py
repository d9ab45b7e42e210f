"""Models, layouts and injected gradients for distributed cases.

Gradients are a function of (seed, step, name), not of the data: a loss would reduce in another
order in another world, and bits could not be compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from amo_dist.distributed.layout import mesh_layout

LAYER: dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]] = {
    "attention.wq.weight": ("attn_q", (12, 8), (16, 8)),
    "attention.wk.weight": ("attn_k", (3, 8), (4, 8)),
    "attention.wv.weight": ("attn_v", (1, 8), (4, 8)),
    "attention.wo.weight": ("attn_o", (7, 12), (8, 16)),
    "feed_forward.w1.weight": ("mlp_gate", (13, 8), (24, 8)),
    "feed_forward.w2.weight": ("mlp_down", (8, 13), (8, 24)),
    "feed_forward.w3.weight": ("mlp_up", (13, 8), (24, 8)),
    "attention_norm.weight": ("", (7,), (8,)),
}
"""Operator types. Shapes: tall, wide and square; rows that no world of 2, 3 or 4 divides; fewer
rows than ranks. And shapes that these worlds divide."""
SHAPES = {name: shape for name, (_, shape, _) in LAYER.items()}
EVEN_SHAPES = {name: shape for name, (_, _, shape) in LAYER.items()}
TYPES = {name: operator_type for name, (operator_type, _, _) in LAYER.items() if operator_type}
NUM_LAYERS = 3


def shapes(of_layer: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, tuple[int, ...]]:
    """Shapes of the whole model by parameter name."""
    found: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (11, 8)}
    for layer in range(NUM_LAYERS):
        found |= {f"layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    return found | {"norm.weight": (8,), "output.weight": (11, 8)}


def types() -> dict[str, str]:
    """Operator type of each matrix of the model."""
    return {
        f"layers.{layer}.{name}": operator_type
        for layer in range(NUM_LAYERS)
        for name, operator_type in TYPES.items()
    }


def _generator(*key: object) -> torch.Generator:
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def initial(name: str, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=_generator("initial", name)) * 0.1


def gradient(seed: int, step: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """Rows of very unequal size, by layer and type, so that ``ell`` differs between matrices."""
    grad = torch.randn(shape, generator=_generator("gradient", seed, step, name))
    if len(shape) < 2:
        return grad
    decay = 0.5 + torch.rand((), generator=_generator("decay", name)).item()
    rows = torch.arange(shape[0], dtype=torch.float32)
    return grad * torch.exp(-decay * rows).unsqueeze(-1)


def build(tensors: Mapping[str, Tensor]) -> nn.Module:
    """A tree of modules whose parameters have the given dotted names."""
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        parameter = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor)
        module.register_parameter(leaf, parameter)
    return root


def plain_model(all_shapes: Mapping[str, tuple[int, ...]], device: str = "cpu") -> nn.Module:
    return build({name: initial(name, shape).to(device) for name, shape in all_shapes.items()})


def make_model(
    layout: str, all_shapes: Mapping[str, tuple[int, ...]], device: str = "cpu"
) -> nn.Module:
    """The model, laid out over the running world.

    Args:
        layout: ``plain``, ``fsdp``, ``hsdp``, ``tp``, ``tp_fsdp`` or ``hsdp_tp``.
        all_shapes: Shapes by name.
        device: Of its parameters and meshes; ``cuda`` in a `tests.simulated_device`.
    """
    if layout == "plain":
        return plain_model(all_shapes, device)
    ranks = dist.get_world_size()
    sizes = {
        "fsdp": {"shard": ranks},
        "hsdp": {"replicate": 2, "shard": ranks // 2},
        "tp": {"tp": ranks},
        "tp_fsdp": {"shard": ranks // 2, "tp": 2},
        "hsdp_tp": {"replicate": 2, "shard": ranks // 4, "tp": 2},
    }[layout]
    mesh = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if "tp" not in sizes:
        return shard(plain_model(all_shapes, device), mesh)
    # As torchtitan lays it out: tensor parallelism cuts first, FSDP what is left of that.
    model = _tensor_parallel(all_shapes, mesh["tp"])
    axes = tuple(name for name in sizes if name != "tp")
    return shard(model, mesh[axes]) if axes else model


def shard(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """FSDP2 over the layers and the rest, with its ``options``."""
    for part in (*model.get_submodule("layers").children(), model):
        fully_shard(part, mesh=mesh, **options)
    return model


def _tensor_parallel(all_shapes: Mapping[str, tuple[int, ...]], mesh: DeviceMesh) -> nn.Module:
    """Columns and rows as in torchtitan; norms and embeddings replicated."""
    tensors: dict[str, Tensor] = {}
    for name, shape in all_shapes.items():
        if name.endswith(("wo.weight", "w2.weight")):
            placement: object = Shard(1)
        elif "attention." in name or "feed_forward." in name:
            placement = Shard(0)
        else:
            placement = Replicate()
        whole = initial(name, shape).to(mesh.device_type)
        tensor = distribute_tensor(whole, mesh, [placement])  # type: ignore[list-item]
        tensors[name] = nn.Parameter(tensor)
    return build(tensors)


def set_gradients(
    model: nn.Module, seed: int, step: int, *, missing: frozenset[str] = frozenset()
) -> None:
    """Give every parameter its injected gradient, in its own placements."""
    for name, param in model.named_parameters():
        if name in missing:
            param.grad = None
            continue
        grad = gradient(seed, step, name, tuple(param.shape)).to(param.dtype)
        param.grad = place_like(grad, param)


def place_like(tensor: Tensor, param: Tensor) -> Tensor:
    """A whole tensor, known on every rank, on the device and in the placements of ``param``."""
    if isinstance(param, DTensor):
        return place(tensor, param.device_mesh, param.placements)
    return tensor.to(param.device)


def place_all(
    shapes: Mapping[str, tuple[int, ...]], placements: dict[str, Any], mesh: Any
) -> dict[str, Tensor]:
    """Parameters on one mesh; the first part of a name that is found gives the placements."""
    tensors: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        own = next(value for key, value in placements.items() if key in name)
        tensor = place(initial(name, shape), mesh, own)
        tensors[name] = nn.Parameter(tensor)
    return tensors


def world_mesh(device: str = "cpu") -> DeviceMesh:
    """All ranks in one axis."""
    return init_device_mesh(device, (dist.get_world_size(),))


def place(tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """A whole tensor, known on every rank, in placements on the device of a mesh.

    Cut here: ``distribute_tensor`` would communicate, and does not know FSDP over TP.
    """
    intervals = mesh_layout(tuple(tensor.shape), mesh.mesh, tuple(placements)).intervals_by_rank
    return DTensor.from_local(
        cut(tensor, intervals[dist.get_rank()]).contiguous().to(mesh.device_type),
        mesh,
        placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def cut(tensor: Tensor, intervals_by_dim: Iterable[Sequence[tuple[int, int]]]) -> Tensor:
    """The part of a tensor in some intervals of each dim."""
    for dim, intervals in enumerate(intervals_by_dim):
        parts = [tensor.narrow(dim, start, stop - start) for start, stop in intervals]
        tensor = torch.cat(parts or [tensor.narrow(dim, 0, 0)], dim)
    return tensor


def whole(tensor: Tensor) -> Tensor:
    """The full value of a parameter, on every rank."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()
