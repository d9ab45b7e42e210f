"""What a locked step asks of a device: operations, and waits of the host.

``python -m benchmarks.launches --before DIR`` runs one of many ranks on the simulated device of the
tests, with the shards and the plan of that rank, matrices of the model's number and kinds but
narrower, and collectives that move nothing. The code in DIR is that of another checkout; each runs
in a process of its own. Nothing is timed: the simulation takes longer than the step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from amo_dist import Muon, MuonConfig, param_groups
from torchtitan_ext.tools.shapes import MODELS, DecoderShape

ROOT = Path(__file__).resolve().parent.parent
WARMUP = 5


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.launches", description=__doc__)
    parser.add_argument("--model", default="Qwen3-1.7B", choices=MODELS)
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--narrower", type=int, default=32, help="divides the width of the model")
    parser.add_argument("--param-dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--before", type=Path, help="root of a checkout to compare with")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(args)
    if options.serve:
        print(json.dumps(count(options)))
        return 0
    from benchmarks.measure import report

    roots = {"now": ROOT} | ({"before": options.before.resolve()} if options.before else {})
    counts_by_code = {name: ask(root, options) for name, root in roots.items()}
    rows = [
        {
            "code": name,
            "operations": sum(counts["operations"].values()),
            "views": sum(n for op, n in counts["operations"].items() if op in VIEWS),
            "waits": sum(counts["waits"].values()),
        }
        for name, counts in counts_by_code.items()
    ]
    for name, counts in counts_by_code.items():
        print(f"{name}: {dict(Counter(counts['operations']).most_common(12))} {counts['waits']}")
    report("launches", rows, options.output, vars(options))
    return 0


VIEWS = frozenset(
    {
        *("view", "slice", "select", "detach", "alias", "as_strided", "split", "split_with_sizes"),
        *("unbind", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "_unsafe_view"),
    }
)


def ask(root: Path, options: argparse.Namespace) -> dict[str, dict[str, int]]:
    """Count with the code of a checkout, in a process of its own."""
    forwarded = [f"--{name}={getattr(options, name)}" for name in ("model", "ranks", "narrower")]
    # As a script, not a module, so that this file counts and not the other checkout's.
    command = [
        sys.executable,
        __file__,
        "--serve",
        *forwarded,
        f"--param-dtype={options.param_dtype}",
    ]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    counts: dict[str, dict[str, int]] = json.loads(done.stdout)
    return counts


def count(options: argparse.Namespace) -> dict[str, dict[str, int]]:
    """Count the operations and waits of a step."""
    torch.set_num_threads(1)
    # The simulation is always this checkout's.
    sys.path.insert(0, str(ROOT))
    from tests.simulated_device import simulated_device

    sys.path.pop(0)
    with simulated_device() as device:
        optimizer = build(make_module(options, make_mesh(options)))
        for _ in range(WARMUP):
            give_gradients(optimizer)
            device.clear()
            step(optimizer)
        return {"operations": device.operations, "waits": device.waits}


def make_mesh(options: argparse.Namespace) -> DeviceMesh:
    """Mesh of many ranks, of which this process is the first; collectives move nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.ranks)
    return init_device_mesh("cuda", (options.ranks,))


def make_module(
    options: argparse.Namespace, mesh: DeviceMesh | None, has_others: bool = True
) -> nn.Module:
    """A narrower model with gradients, its rows sharded over the mesh; whole where that is None.

    Args:
        options: Model, its factor of width, and dtype of parameters.
        mesh: Mesh of `make_mesh`.
        has_others: Whether it has embeddings and norms beside matrices.
    """
    whole, by = MODELS[options.model], options.narrower
    model = DecoderShape(
        whole.layers,
        whole.dim // by,
        whole.ffn_dim // by,
        whole.heads,
        whole.kv_heads,
        whole.q_ratio,
    )
    root, dtype = nn.Module(), getattr(torch, options.param_dtype)
    generator = torch.Generator().manual_seed(0)

    def sharded(shape: tuple[int, ...]) -> Tensor:
        rows = shape[0] if mesh is None else shape[0] // options.ranks
        tensor = torch.randn(rows, *shape[1:], generator=generator).to("cuda", dtype)
        if mesh is None:
            return tensor
        return DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False)

    def add(name: str, shape: tuple[int, ...]) -> None:
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        parameter = nn.Parameter(sharded(shape))
        parameter.grad = sharded(shape)
        module.register_parameter(leaf, parameter)

    for layer in range(model.layers):
        for matrix in model.block():
            add(f"layers.{layer}.{matrix.name}", matrix.shape)
        if has_others:
            add(f"layers.{layer}.attention_norm.weight", (model.dim,))
            add(f"layers.{layer}.ffn_norm.weight", (model.dim,))
    if has_others:
        add("tok_embeddings.weight", (options.ranks * 8, model.dim))
        add("norm.weight", (model.dim,))
        add("output.weight", (options.ranks * 8, model.dim))
    return root


def build(module: nn.Module, **fields: Any) -> Muon:
    """The optimizer over the shards of a module, with fields of its config."""
    return Muon(param_groups(module), lr=1e-3, config=MuonConfig(ns_guard_every=0, **fields))


class Done:
    def wait(self) -> None:
        pass


def transfer(output: Tensor | Sequence[Tensor], *args: Any, **kwargs: Any) -> Done:
    """Stands for a transfer; of memory that nobody wrote, products would be NaN."""
    for tensor in [output] if isinstance(output, Tensor) else output:
        tensor.zero_()
    return Done()


def local(tensor: Tensor) -> Tensor:
    """The shard of this rank."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def renewed(grad: Tensor) -> Tensor:
    """A gradient as a new tensor, as after a backward pass."""
    if not isinstance(grad, DTensor):
        return grad.detach()
    shard = grad._local_tensor.detach()
    return DTensor.from_local(shard, grad.device_mesh, grad.placements, run_check=False)


def give_gradients(optimizer: Muon) -> None:
    """Renew the gradients of all parameters."""
    for param in optimizer.params_by_name.values():
        assert param.grad is not None
        param.grad = renewed(param.grad)


def step(optimizer: Muon) -> None:
    with mock.patch.object(dist, "all_to_all_single", transfer):
        optimizer.step()


if __name__ == "__main__":
    raise SystemExit(main())
