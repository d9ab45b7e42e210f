"""What a locked step asks of a device: operations, bytes, and waits of the host.

``python -m benchmarks.launches`` runs one of 32 ranks on the simulated device of the tests, with
the shards and the plan of that rank, matrices of the number and kinds of Qwen3-1.7B but narrower,
and collectives that move nothing. Nothing is timed: the simulation takes longer than the step.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from amo_dist import Muon, MuonConfig, make_optimizer, param_groups
from amo_dist.compat import StridedShard
from amo_dist.distributed.layout import local_tensor, mesh_layout
from benchmarks.measure import report
from benchmarks.shapes import MODELS, shapes_by_name
from tests.distributed.models import build
from tests.simulated_device import Device, simulated_device

RANKS, WHOLE, NARROWER = 32, MODELS["Qwen3-1.7B"], 32
"""Ranks; the model; the number by which its widths are divided to count."""
WARMUP = 5
VIEWS = frozenset(
    {
        *("view", "slice", "select", "detach", "alias", "as_strided", "split", "split_with_sizes"),
        *("unbind", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "_unsafe_view"),
    }
)


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.launches", description=__doc__)
    parser.add_argument("--params", default="float32", choices=("float32", "bfloat16", "master"))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--optimizer", default="Muon", choices=("Muon", "NorMuon", "AdaMuon"))
    parser.add_argument("--cautious", action="store_true", help="with cautious decay")
    parser.add_argument("--tp", type=int, default=1, help="ranks of tensor parallelism")
    options = parser.parse_args(args)
    device, num_elements = count(options.params, options.optimizer, options.cautious, tp=options.tp)
    # Products are counted by their flops elsewhere; zeros stand in for transfers here.
    passes = [x for name, x in device.bytes.items() if not name.endswith(("mm", "zero_"))]
    row = {
        "operations": device.operations.total() - device.operations["launches of copies"],
        "views": sum(device.operations[name] for name in VIEWS),
        "launches_of_copies": device.operations["launches of copies"],
        "waits": device.waits.total(),
        "bytes_per_element": round(sum(passes) / num_elements, 1),
    }
    report("launches", [row], options.output, vars(options))
    return 0


def count(
    params: str, name: str = "Muon", cautious: bool = False, *, tp: int = 1
) -> tuple[Device, int]:
    """The device after one step, and elements of the rank's shards of matrices.

    Args:
        params: Dtype of the parameters, or ``master``: bfloat16 with master weights.
        name: Name of the optimizer.
        cautious: Whether weights decay only where the update has their sign.
        tp: Ranks that divide each matrix by tensor parallelism; the others shard its rows.
    """
    torch.set_num_threads(1)
    is_master = params == "master"
    with simulated_device() as device:
        # Collectives of this group move nothing.
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
        try:
            dtype = torch.bfloat16 if is_master else getattr(torch, params)
            module = make_module(
                init_device_mesh("cuda", (RANKS // tp, tp) if tp > 1 else (RANKS,)), dtype
            )
            config = MuonConfig(
                ns_guard_every=0,
                # A narrower model has as many buckets.
                bucket_bytes=MuonConfig().bucket_bytes // NARROWER**2,
                bfloat16_params="master" if is_master else "nearest",
                cautious_decay=cautious,
            )
            optimizer = make_optimizer(name, param_groups(module), lr=1e-3, config=config)
            assert isinstance(optimizer, Muon)
            states = optimizer.state.values()
            momenta = [state["momentum_buffer"] for state in states if "momentum_buffer" in state]
            num_elements = sum(local_tensor(momentum).numel() for momentum in momenta)
            for _ in range(WARMUP):
                renew_gradients(module)
                device.clear()
                with mock.patch.object(torch, "_foreach_copy_", copy_lists(device)):
                    step(optimizer)
        finally:
            dist.destroy_process_group()
        return device, num_elements


def make_module(mesh: DeviceMesh, dtype: torch.dtype, narrower: int = NARROWER) -> nn.Module:
    """The narrower model with gradients, sharded over the mesh.

    Args:
        mesh: Mesh of FSDP, or of FSDP and tensor parallelism.
        dtype: Dtype of the parameters.
        narrower: Number by which its widths are divided.
    """
    model = dataclasses.replace(WHOLE, dim=WHOLE.dim // narrower, ffn_dim=WHOLE.ffn_dim // narrower)
    shapes: dict[str, tuple[int, ...]] = {**shapes_by_name(model)}
    for layer in range(model.layers):
        shapes[f"layers.{layer}.attention_norm.weight"] = (model.dim,)
        shapes[f"layers.{layer}.ffn_norm.weight"] = (model.dim,)
    shapes["norm.weight"] = (model.dim,)
    shapes["tok_embeddings.weight"] = shapes["output.weight"] = (RANKS * 8, model.dim)
    generator = torch.Generator().manual_seed(0)

    def sharded(name: str, shape: tuple[int, ...]) -> Tensor:
        by_columns = name.endswith(("wo.weight", "w2.weight"))
        own = [Shard(0), Shard(1)] if by_columns else [StridedShard(0, split_factor=tp), Shard(0)]
        placements = own if tp > 1 else [Shard(0)]
        local = mesh_layout(shape, mesh.mesh, placements).local_shape(0)
        tensor = torch.randn(local, generator=generator).to(mesh.device_type, dtype)
        return DTensor.from_local(tensor, mesh, placements, run_check=False)

    tp = mesh.size(1) if mesh.ndim > 1 else 1
    module = build({name: sharded(name, shape) for name, shape in shapes.items()})
    for name, parameter in module.named_parameters():
        parameter.grad = sharded(name, tuple(parameter.shape))
    return module


def copy_lists(device: Device) -> Callable[..., None]:
    """``torch._foreach_copy_`` that counts launches: one a list, or a tensor where any has gaps."""
    copy = torch._foreach_copy_

    def counted(
        targets: Sequence[Tensor], sources: Sequence[Tensor], *args: Any, **kw: Any
    ) -> None:
        is_dense = all(x.is_contiguous() for x in (*targets, *sources))
        device.operations["launches of copies"] += 1 if is_dense else len(targets)
        copy(targets, sources, *args, **kw)

    return counted


def renew_gradients(module: nn.Module) -> None:
    """Make every gradient a new tensor, as after a backward pass."""
    for parameter in module.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad.detach()


def step(optimizer: Muon) -> None:
    """A step whose collectives move nothing."""
    with mock.patch.object(dist, "all_to_all_single", transfer):
        optimizer.step()


class Done:
    def wait(self) -> None:
        pass


def transfer(output: Tensor | Sequence[Tensor], *args: Any, **kwargs: Any) -> Done:
    """Stands for a transfer; of memory that nobody wrote, products would be NaN."""
    for tensor in [output] if isinstance(output, Tensor) else output:
        tensor.zero_()
    return Done()


if __name__ == "__main__":
    raise SystemExit(main())
