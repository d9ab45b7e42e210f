"""A small model in every layout, and gradients that all ranks generate alike."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from amo_dist.distributed.layout import layout_of
from amo_dist.optimizers.muon import Muon
from amo_dist.tools.doctor.site import Site

Shapes = Mapping[str, tuple[int, ...]]

BLOCK: Shapes = {
    "attention.wq.weight": (32, 32),
    "attention.wk.weight": (16, 32),
    "attention.wv.weight": (16, 32),
    "attention.wo.weight": (32, 32),
    "feed_forward.w1.weight": (64, 32),
    "feed_forward.w3.weight": (64, 32),
    "feed_forward.w2.weight": (32, 64),
    "attention_norm.weight": (32,),
}
"""Parameters of a block under torchtitan's names."""
DECODER: Shapes = {
    "tok_embeddings.weight": (48, 32),
    **{f"layers.{layer}.{name}": shape for layer in range(2) for name, shape in BLOCK.items()},
    "norm.weight": (32,),
}
"""Parameters of two blocks with tied embeddings."""


def build(shapes: Shapes, make: Callable[[str], Tensor]) -> nn.Module:
    """Build a tree of modules with parameters of these names."""
    root = nn.Module()
    for name in shapes:
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(leaf, nn.Parameter(make(name)))
    return root


def normal(key: str, shape: Sequence[int]) -> Tensor:
    """Draw normal entries from a key, alike on every rank and device."""
    generator = torch.Generator("cpu").manual_seed(zlib.crc32(key.encode()))
    return torch.randn(tuple(shape), generator=generator, device="cpu")


def gradient(step: int, name: str, shape: Sequence[int]) -> Tensor:
    """Make a gradient; names decide how well its matrices are conditioned."""
    entries = normal(f"gradient {step} {name}", shape)
    if len(shape) < 2:
        return entries
    decay = (1 + zlib.crc32(name.encode()) % 8) / 16
    return entries * torch.exp(-decay * torch.arange(shape[0], device="cpu")).unsqueeze(-1)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a parameter or gradient, detached."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def place_like(tensor: Tensor, param: Tensor) -> Tensor:
    """Place a tensor that every rank holds whole like a parameter: device, dtype, placements."""
    tensor = tensor.to(param.device, param.dtype)
    if not isinstance(param, DTensor):
        return tensor
    # distribute_tensor would communicate, and cannot place FSDP over TP.
    layout = layout_of(param, "tensor", [])
    mesh = param.device_mesh
    for dim, intervals in enumerate(layout.intervals_by_rank[mesh.get_rank()]):
        parts = [tensor.narrow(dim, start, stop - start) for start, stop in intervals]
        tensor = torch.cat(parts or [tensor.narrow(dim, 0, 0)], dim)
    return DTensor.from_local(
        tensor.contiguous(),
        mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


def make_model(site: Site, layout: str, shapes: Shapes | None = None) -> nn.Module:
    """Make a model in a layout over the world.

    Args:
        site: Ranks of the world.
        layout: ``one``, ``replicate``, ``fsdp``, ``hsdp`` or ``tp x fsdp``.
        shapes: Shapes of the parameters; None for those of a small decoder.
    """
    shapes = DECODER if shapes is None else shapes

    def initial(name: str) -> Tensor:
        return (0.1 * normal(name, shapes[name])).to(site.device)

    kind, size = site.device.type, site.world_size
    if layout in ("one", "replicate"):
        return build(shapes, initial)
    if layout == "tp x fsdp":
        mesh = init_device_mesh(kind, (size // 2, 2), mesh_dim_names=("shard", "tp"))
        model = build(shapes, lambda name: _tensor_parallel(name, initial(name), mesh["tp"]))
        return shard(model, mesh["shard"])
    if layout == "hsdp":
        replicas = len(site.nodes) if site.nodes_are_replicas else 2
        names = ("replicate", "shard")
        mesh = init_device_mesh(kind, (replicas, size // replicas), mesh_dim_names=names)
        return shard(build(shapes, initial), mesh)
    return shard(build(shapes, initial), init_device_mesh(kind, (size,)))


def _tensor_parallel(name: str, tensor: Tensor, mesh: Any) -> Tensor:
    rows = name.endswith(("wo.weight", "w2.weight"))
    columns = not rows and name.startswith("layers.") and "norm" not in name
    placement = Shard(1) if rows else Shard(0) if columns else Replicate()
    return distribute_tensor(tensor, mesh, [placement])


def shard(model: nn.Module, mesh: Any) -> nn.Module:
    """Apply FSDP2 to each block and to the model."""
    for layer in model.get_submodule("layers").children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train(model: nn.Module, optimizer: Muon, steps: range) -> None:
    """Take steps with the gradients of their numbers."""
    for step in steps:
        set_gradients(model, step)
        optimizer.step()


def set_gradients(model: nn.Module, step: int) -> None:
    """Give every parameter the gradient of a step."""
    for name, param in model.named_parameters():
        param.grad = place_like(gradient(step, name, param.shape), param)


def parts(model: nn.Module) -> dict[str, Tensor]:
    """Copy this rank's parts of all parameters."""
    return {name: local(param).clone() for name, param in model.named_parameters()}


def differing(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors that differ in a bit."""
    return [name for name, tensor in tensors.items() if not torch.equal(tensor, expected[name])]
