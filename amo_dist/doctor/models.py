"""A small run in every layout, with gradients that all ranks generate alike."""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from amo_dist.config import AMOConfig
from amo_dist.distributed.layout import local_tensor
from amo_dist.doctor.site import Site
from amo_dist.operators.groups import param_groups
from amo_dist.optimizers.amo import AMO

# Fewest ranks of each layout; those of four need an even number.
LAYOUTS = {"one": 1, "replicate": 2, "fsdp": 2, "hsdp": 4, "tp x fsdp": 4}


class Run:
    """A model in a layout over the world, and its optimizer.

    Args:
        site: Ranks of the world.
        layout: Key of `LAYOUTS`.
        config: Settings of the optimizer.
    """

    def __init__(self, site: Site, layout: str, config: AMOConfig) -> None:
        self.model = make_model(site, layout)
        params = self.model.named_parameters()
        self._start = {name: local_tensor(param).clone() for name, param in params}
        group = dist.group.WORLD if layout == "replicate" else None
        groups = param_groups(self.model)
        self.optimizer = AMO(groups, lr=3e-3, config=config, process_group=group)

    def train(self, num_steps: int) -> None:
        """Take steps with gradients that the first entries alone decide, in any layout."""
        for step in range(1, num_steps + 1):
            for name, param in self.model.named_parameters():
                param.grad = param.detach().clone()
                # Products and fractional parts have the same bits wherever an entry lies.
                values = ((1000 + 37 * step) * self._start[name]).frac() - 0.5
                local_tensor(param.grad).copy_(values)
            self.optimizer.step()

    def whole(self) -> dict[str, Tensor]:
        """Gather all parameters."""
        params = {name: param.detach() for name, param in self.model.named_parameters()}
        return {
            name: param.full_tensor() if isinstance(param, DTensor) else param.clone()
            for name, param in params.items()
        }


def _decoder() -> nn.Module:
    """Make two blocks with tied embeddings under torchtitan's names, alike on every rank."""

    def module(**children: nn.Module) -> nn.Module:
        return nn.Sequential(OrderedDict(children))

    def linear(columns: int, rows: int) -> nn.Module:
        return nn.Linear(columns, rows, bias=False, device="cpu")

    def block() -> nn.Module:
        heads = {"wq": linear(32, 32), "wk": linear(32, 16), "wv": linear(32, 16)}
        return module(
            attention=module(**heads, wo=linear(32, 32)),
            feed_forward=module(w1=linear(32, 64), w3=linear(32, 64), w2=linear(64, 32)),
            attention_norm=nn.LayerNorm(32, bias=False, device="cpu"),
        )

    torch.manual_seed(0)
    layers = nn.ModuleList([block(), block()])
    return module(tok_embeddings=nn.Embedding(48, 32, device="cpu"), layers=layers)


def make_model(site: Site, layout: str) -> nn.Module:
    """Make a small decoder in a layout over the world."""
    model = _decoder().to(site.device)
    if layout in ("one", "replicate"):
        return model
    shape, names = {
        "fsdp": ((site.world_size,), ("shard",)),
        "hsdp": ((2, site.world_size // 2), ("replicate", "shard")),
        "tp x fsdp": ((site.world_size // 2, 2), ("shard", "tp")),
    }[layout]
    mesh = init_device_mesh(site.device.type, shape, mesh_dim_names=names)
    if layout == "tp x fsdp":
        plan = {
            "tok_embeddings": RowwiseParallel(),
            "layers.*.attention.w[qkv]": ColwiseParallel(),
            "layers.*.feed_forward.w[13]": ColwiseParallel(),
            "layers.*.attention.wo": RowwiseParallel(),
            "layers.*.feed_forward.w2": RowwiseParallel(),
            "layers.*.attention_norm": SequenceParallel(),
        }
        parallelize_module(model, mesh["tp"], plan)
        mesh = mesh["shard"]
    for layer in model.get_submodule("layers").children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
