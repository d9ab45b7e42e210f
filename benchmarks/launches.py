"""What a locked step asks of the host: operations dispatched, and seconds to dispatch them.

``python -m benchmarks.launches --before DIR`` runs the path for devices on CPU tensors: one of many
ranks, with the shards and the plan of that rank, matrices of the model's number and kinds but
narrower, and collectives that move nothing. Small matrices make kernels cheap, so that a step is
nearly all host. The code in DIR (another checkout) takes turns with this one, each in a process of
its own; a ratio is the median over rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from amo_dist import Muon, MuonConfig, param_groups
from amo_dist.kernels.cuda.kernels import CudaKernels
from amo_dist.tools.shapes import MODELS, DecoderShape

ROOT = Path(__file__).resolve().parent.parent
WARMUP = 5


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.launches", description=__doc__)
    parser.add_argument("--model", default="Qwen3-1.7B", choices=MODELS)
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--narrower", type=int, default=32, help="divides the width of the model")
    parser.add_argument("--param-dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--before", type=Path, help="root of a checkout to compare with")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(args)
    if options.serve:
        serve(options)
        return 0
    from benchmarks.measure import ratio, report

    roots = {"now": ROOT} | ({"before": options.before.resolve()} if options.before else {})
    with contextlib.ExitStack() as stack:
        workers = {name: stack.enter_context(start(root, options)) for name, root in roots.items()}
        counts = {name: ask(worker, "count") for name, worker in workers.items()}
        seconds: dict[str, list[float]] = {name: [] for name in workers}
        for _ in range(options.rounds):
            for name, worker in workers.items():
                seconds[name].append(ask(worker, "step"))
    rows = [
        {
            "code": name,
            "operations": sum(counts[name].values()),
            "views": sum(number for op, number in counts[name].items() if op in VIEWS),
            "host ms": 1e3 * statistics.median(seconds[name]),
            "host, to now": ratio(seconds, name, "now"),
        }
        for name in workers
    ]
    for name in workers:
        print(f"{name}: {dict(Counter(counts[name]).most_common(12))}")
    report("launches", rows, options.output, vars(options))
    return 0


VIEWS = frozenset(
    f"aten::{name}"
    for name in (
        *("view", "slice", "select", "detach", "alias", "as_strided", "split", "split_with_sizes"),
        *("unbind", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "_unsafe_view"),
    )
)


def start(root: Path, options: argparse.Namespace) -> subprocess.Popen[str]:
    """A process with the code of a checkout, which answers questions."""
    told = [f"--{name}={getattr(options, name)}" for name in ("model", "ranks", "narrower")]
    command = [sys.executable, __file__, "--serve", *told, f"--param-dtype={options.param_dtype}"]
    # Not as a module: this very file measures, whatever stands in the other checkout.
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def ask(worker: subprocess.Popen[str], question: str) -> Any:
    assert worker.stdin is not None
    assert worker.stdout is not None
    print(question, file=worker.stdin, flush=True)
    return json.loads(worker.stdout.readline())


def serve(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    gc.disable()  # what one contender leaves behind is not counted in a step of it
    optimizer = build(options)
    for _ in range(WARMUP):
        step(optimizer)
    for question in map(str.strip, sys.stdin):
        answer = count(optimizer) if question == "count" else step(optimizer)
        print(json.dumps(answer), flush=True)


def build(options: argparse.Namespace) -> Muon:
    """Rank 0 of many: the optimizer over its shards, on the path for devices."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.ranks)
    mesh = init_device_mesh("cpu", (options.ranks,))
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
        local = torch.randn(shape[0] // options.ranks, *shape[1:], generator=generator)
        return DTensor.from_local(local.to(dtype), mesh, [Shard(0)], run_check=False)

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

    add("tok_embeddings.weight", (options.ranks * 8, model.dim))
    for layer in range(model.layers):
        for matrix in model.block():
            add(f"layers.{layer}.{matrix.name}", matrix.shape)
        add(f"layers.{layer}.attention_norm.weight", (model.dim,))
        add(f"layers.{layer}.ffn_norm.weight", (model.dim,))
    add("norm.weight", (model.dim,))
    add("output.weight", (options.ranks * 8, model.dim))
    kernels = CudaKernels(torch.bfloat16)
    with mock.patch("amo_dist.engine.engine.make_kernels", return_value=kernels):
        return Muon(param_groups(root), lr=1e-3, config=MuonConfig(ns_guard_every=0))


class Done:
    def wait(self) -> None:
        pass


def all_to_all(output: Tensor, *args: Any, **kwargs: Any) -> Done:
    """Stands for a transfer; of memory that nobody wrote, products would be NaN."""
    output.zero_()
    return Done()


def step(optimizer: Muon) -> float:
    """Seconds of a step, with gradients that are new tensors, as after a backward pass."""
    for param in optimizer.params_by_name.values():
        assert isinstance(param.grad, DTensor)
        local = param.grad._local_tensor.detach()
        assert isinstance(param, DTensor)
        param.grad = DTensor.from_local(local, param.device_mesh, param.placements, run_check=False)
    with mock.patch.object(dist, "all_to_all_single", all_to_all):
        start = time.process_time()  # the machine may do other things
        optimizer.step()
        return time.process_time() - start


class Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.numbers: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("aten::"):
            self.numbers[name] += 1
        return func(*args, **(kwargs or {}))


def count(optimizer: Muon) -> Counter[str]:
    """How often a step dispatches each operation."""
    with mock.patch.object(dist, "all_to_all_single", all_to_all), Count() as found:
        optimizer.step()
    return found.numbers


if __name__ == "__main__":
    raise SystemExit(main())
