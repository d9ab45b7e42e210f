"""Work that a locked step asks of a device, counted by kind: ours beside its peers.

``python -m benchmarks.device_work --dion-path DIR`` runs one of many ranks on the simulated device
of the tests: matrices of the model's number and kinds but narrower, collectives that move nothing,
each contender in a process of its own. Nothing is timed.

- *products*: launches and flops by dtype. Of a symmetric product of Dion's Triton kernels, or of
  quack-kernels, half is counted. Flops are scaled to the width of the model.
- *passes*: launches of all other kernels, and the bytes that they read and write for an element of
  the matrices of this rank, from gradient to parameter. A call of a compiled function is one launch
  for each run of kernels between two products; it reads its inputs and writes its results once.
- *sent*: bytes that leave the rank for an element, through collectives.
- *peak*: bytes for an element that the step holds at its worst moment beyond those that it began
  with.
- *waits* of the host for the device.

``torch.optim.Muon`` has no sharded form: each rank of a replicated model does all of its work.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import json
import math
import os
import subprocess
import sys
import types
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_iter

from amo_dist.kernels import quack
from amo_dist.kernels.newton_schulz import _multiply
from benchmarks import launches
from benchmarks.optimizer_step import count_bytes
from tests import simulated_device as simulation

CONTENDERS = ("ours", "ours, quack", "dion Muon", "torch Muon")
WARMUP = 3
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
_NO_KERNEL = launches.VIEWS | {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "is_pinned"),
    *("lift_fresh", "_reshape_alias", "diagonal"),
}


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device_work", description=__doc__)
    parser.add_argument("--contenders", nargs="+", default=CONTENDERS, choices=CONTENDERS)
    parser.add_argument("--model", default="Qwen3-1.7B", choices=launches.MODELS)
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--narrower", type=int, default=16, help="divides the width of the model")
    parser.add_argument("--param-dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--dion-path", type=Path, help="root of microsoft/dion")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args(args)
    if options.serve:
        print(json.dumps(count(options.serve, options)))
        return 0
    from benchmarks.measure import report

    rows = []
    for name in options.contenders:
        if name == "dion Muon" and options.dion_path is None:
            rows.append({"optimizer": name, "products": "no --dion-path"})
            continue
        rows.append({"optimizer": name, **ask(name, options)})
    report("device_work", rows, options.output, vars(options))
    return 0


def ask(name: str, options: argparse.Namespace) -> dict[str, object]:
    """Run `count` in a process of its own."""
    fields = ("model", "ranks", "narrower", "param_dtype", "dion_path")
    values = {field: getattr(options, field) for field in fields}
    command = [sys.executable, "-m", "benchmarks.device_work", "--serve", name]
    for field, value in values.items():
        if value is not None:
            command += [f"--{field.replace('_', '-')}", str(value)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=launches.ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    row: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return row


def count(name: str, options: argparse.Namespace) -> dict[str, object]:
    """Count the work of a step of one contender after warm-up."""
    torch.set_num_threads(1)
    work = Work()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch, "compile", work.compile))
        device = stack.enter_context(simulation.simulated_device())
        # Compiled functions take numbers of the CPU where single foreach kernels refuse them.
        strict = mock.patch.object(simulation, "_STRICT", ("cat", "stack"))
        stack.enter_context(strict if name == "dion Muon" else contextlib.nullcontext())
        mesh = launches.make_mesh(options)
        module = launches.make_module(options, None if name == "torch Muon" else mesh, False)
        params = list(module.parameters())
        num_elements = sum(launches.local(param).numel() for param in params)
        optimizer = _build(name, module, mesh, options, work)
        for transfer in ("all_to_all_single", "all_to_all"):
            stack.enter_context(mock.patch.object(dist, transfer, work.transfer))
        stack.enter_context(work.counting())
        for _ in range(WARMUP):
            for param in params:
                assert param.grad is not None
                param.grad = launches.renewed(param.grad)
            device.clear()
            work.clear()
            with count_bytes() as counted:
                optimizer.step()
        waits = sum(device.waits.values())
    by_dtype = {
        f"{str(dtype).removeprefix('torch.')} Tflop": flops * options.narrower**3 / 1e12
        for dtype, flops in work.flops.items()
    }
    return {
        "products": work.launches["product"],
        **by_dtype,
        "passes": work.launches["pass"],
        "B/element": work.bytes / num_elements,
        "sent B/element": counted["bytes"] / num_elements,
        "peak B/element": work.peak / num_elements,
        "waits": waits,
    }


def _build(
    name: str, module: torch.nn.Module, mesh: Any, options: argparse.Namespace, work: Work
) -> torch.optim.Optimizer:
    params = list(module.parameters())
    if name.startswith("ours"):
        fields = {"ns_kernels": "torch"}
        if "quack" in name:
            _stand_in_for_quack(work)
            fields["ns_kernels"] = "quack"
        return launches.build(module, **fields)
    if name == "torch Muon":
        return torch.optim.Muon(params, lr=1e-3, weight_decay=0.1)
    sys.path.insert(0, str(options.dion_path))
    from dion import Muon as DionMuon  # type: ignore[import-not-found]
    from dion import polar_express

    # The Triton kernels of symmetric products, as products of half the flops.
    def square(x: torch.Tensor, *, out: torch.Tensor) -> None:
        with work.half():
            torch.matmul(x, x.mT, out=out)

    def polynomial(x: torch.Tensor, *, alpha: float, beta: float, out: torch.Tensor) -> None:
        with work.half():
            torch.baddbmm(x, x, x, alpha=alpha, beta=beta, out=out)

    polar_express.ns_line_1, polar_express.ns_line_2 = square, polynomial
    function = polar_express.polar_express_triton
    optimizer: torch.optim.Optimizer = DionMuon(
        params,
        distributed_mesh=mesh,
        lr=1e-3,
        weight_decay=0.1,
        nesterov=True,
        newton_schulz_func=function,
    )
    return optimizer


def _stand_in_for_quack(work: Work) -> None:
    """Its symmetric products, as products of half the flops, and its fused ``aX + BX``."""

    def symmetric(
        a: torch.Tensor,
        b: torch.Tensor,
        C: torch.Tensor | None,
        out: torch.Tensor,
        alpha: float,
        beta: float,
    ) -> None:
        with work.half():
            _multiply(a, b, C, beta, alpha, out=out)

    def add(
        a: torch.Tensor,
        b: torch.Tensor,
        C: torch.Tensor,
        out: torch.Tensor,
        beta: float,
        tuned: bool,
    ) -> None:
        _multiply(a, b, C, beta, out=out)

    interface = types.ModuleType("quack.gemm_interface")
    interface.gemm_symmetric, interface.gemm_add = symmetric, add  # type: ignore[attr-defined]
    sys.modules |= {"quack": types.ModuleType("quack"), interface.__name__: interface}
    importlib.metadata.version = lambda name: quack.VERSION
    # Of the narrower model.
    quack._MIN_ROWS = 64


class Work:
    """Counters of what runs on the simulated device.

    Attributes:
        launches: Number of launches by kind, ``product`` and ``pass``.
        flops: Flops of products by dtype.
        bytes: Bytes that passes read and write.
        peak: Bytes of the tensors that a step has made, at the worst moment.
    """

    def __init__(self) -> None:
        self._share, self._is_counting = 1.0, True
        self._compiled: _Chain | None = None
        self.clear()

    def clear(self) -> None:
        """Begin to count anew."""
        self.launches: Counter[str] = Counter()
        self.flops: Counter[torch.dtype] = Counter()
        self.bytes = self.peak = self._live = 0
        self._epoch = object()
        self._known: set[int] = set()

    @contextlib.contextmanager
    def half(self) -> Iterator[None]:
        """Count half of the flops of products inside."""
        self._share = 0.5
        yield
        self._share = 1.0

    def transfer(self, *args: Any, **kwargs: Any) -> launches.Done:
        """Stand for a transfer, which counts as no pass."""
        self._is_counting = False
        done = launches.transfer(*args, **kwargs)
        self._is_counting = True
        return done

    def compile(self, function: Any = None, **options: Any) -> Any:
        """Stands for ``torch.compile``: passes inside a call are fused between products."""
        if function is None:
            return functools.partial(self.compile, **options)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._compiled is not None:
                return function(*args, **kwargs)
            self._compiled = _Chain()
            try:
                return function(*args, **kwargs)
            finally:
                # The caller holds the results by now, and nobody the function's own tensors.
                chain, self._compiled = self._compiled, None
                self._end(chain)

        return call

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count what goes through the function of the simulation that runs all operations."""
        run = simulation._run

        def record(func: Any, args: Any, kwargs: Any, types: Any = ()) -> Any:
            result = run(func, args, kwargs, types)
            is_kernel = result is not NotImplemented and "c10d" not in func._schema.name
            if is_kernel and self._is_counting:
                self._count(func, (args, kwargs), result)
            return result

        with mock.patch.object(simulation, "_run", record):
            yield

    def _count(self, func: Any, given: Any, result: Any) -> None:
        name = func._schema.name.partition("::")[2]
        inputs, outputs = _on_device(given), _on_device(result)
        if not (inputs or outputs):
            return
        known = {id(x) for x in inputs}
        made = [x for x in outputs if id(x) not in known]
        if name not in launches.VIEWS:
            for tensor in made:
                self._hold(tensor)
        if name in _NO_KERNEL:
            return
        # The schema tells which arguments an operation writes.
        arguments = zip(func._schema.arguments, given[0], strict=False)
        written = [v for a, v in arguments if a.alias_info is not None and a.alias_info.is_write]
        named = {a.name: a for a in func._schema.arguments}
        for key, value in given[1].items():
            info = named[key].alias_info if key in named else None
            written += [value] if info is not None and info.is_write else []
        targets = _on_device(written)
        only_written = targets if name in ("copy_", "_foreach_copy_", "zero_", "fill_") else []
        only_written = only_written + _on_device(given[1].get("out"))
        skipped = {id(x) for x in only_written}
        sources = [x for x in inputs if id(x) not in skipped]
        if name in _PRODUCTS:
            if self._compiled is not None:
                self._end(self._compiled)
                self._compiled = _Chain()
            left, right = sources[-2:]
            self.launches["product"] += 1
            flops = 2.0 * left.numel() * right.shape[-1] * self._share
            self.flops[left.dtype] += flops  # type: ignore[assignment]
        elif self._compiled is not None:
            self._compiled.add(sources, targets, made)
        else:
            self.launches["pass"] += 1
            self.bytes += sum(map(_size, [*sources, *targets, *made]))

    def _end(self, chain: _Chain) -> None:
        if chain.is_used:
            self.launches["pass"] += 1
            self.bytes += chain.bytes()

    def _hold(self, tensor: Any) -> None:
        storage, epoch = tensor.values.untyped_storage(), self._epoch
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self._live += size
        self.peak = max(self.peak, self._live)

        def forget() -> None:
            if self._epoch is epoch:
                self._known.discard(key)
                self._live -= size

        weakref.finalize(storage, forget)


class _Chain:
    """Passes of a compiled function between two products: one kernel."""

    def __init__(self) -> None:
        self.is_used = False
        self._made: dict[int, weakref.ref[Any]] = {}
        self._read: dict[tuple[int, int], int] = {}
        self._written: dict[tuple[int, int], int] = {}

    def add(self, sources: Sequence[Any], targets: Sequence[Any], made: Sequence[Any]) -> None:
        """Take in one operation."""
        self.is_used = True
        for numbers, tensors in ((self._read, sources), (self._written, targets)):
            for tensor in tensors:
                if tensor.values.untyped_storage()._cdata not in self._made:
                    numbers[tensor.values.data_ptr(), tensor.numel()] = _size(tensor)
        for tensor in made:
            self._made[tensor.values.untyped_storage()._cdata] = weakref.ref(tensor)

    def bytes(self) -> int:
        """Bytes of inputs, of what is written in place, and of results that outlive the chain."""
        results = (ref() for ref in self._made.values())
        alive = sum(_size(tensor) for tensor in results if tensor is not None)
        return sum(self._read.values()) + sum(self._written.values()) + alive


def _size(tensor: Any) -> int:
    # A tensor that is expanded is read once.
    pairs = zip(tensor.shape, tensor.values.stride(), strict=True)
    return math.prod(size for size, stride in pairs if stride) * tensor.element_size()


def _on_device(value: Any) -> list[Any]:
    return [x for x in tree_iter(value) if isinstance(x, simulation.SimulatedTensor)]


if __name__ == "__main__":
    raise SystemExit(main())
