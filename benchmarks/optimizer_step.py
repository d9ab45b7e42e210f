"""One optimizer step: ours beside its peers; time and bytes sent.

``python -m benchmarks.optimizer_step``. Every peer meets ours in a world of gloo processes of its
own, on the same matrices and gradients; the two take turns, and the ratio is the median over
rounds. Parameters are sharded by rows over all ranks (DTensor). The peers are ``torch.optim.Muon``,
in one process, and the Muon of microsoft/dion, from the checkout ``--dion-path``, not compiled.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from amo_dist import Muon, MuonConfig, param_groups
from amo_dist.schedule.allocate import flop_budget, least_error, ns_step_flops
from amo_dist.schedule.polar_express import error_curve, schedule_for, times_safety
from amo_dist.schedule.source import Fixed
from amo_dist.schedule.types import MatrixInfo, Schedule
from benchmarks.measure import paired, ratio, report
from benchmarks.shapes import ELL_BY_TYPE, MODELS, DecoderShape, make_module, matrices

OURS = ("ours uniform", "ours locked")
PEERS = ("torch Muon", "dion Muon")
DEFAULT_MODELS = ("Llama-3.1-75M", "Qwen3-70M")
"""9 and 31 million elements in matrices; Qwen3-300M has 204 and Llama-3.1-480M 218."""


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.optimizer_step", description=__doc__
    )
    parser.add_argument("--models", nargs="+", default=DEFAULT_MODELS, choices=MODELS)
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--ours", nargs="+", default=list(OURS), choices=OURS)
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=PEERS)
    parser.add_argument("--ns-dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dion-path", type=Path)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(args)
    rows = []
    choices = itertools.product(options.models, options.ranks, options.ours, options.peers)
    for name, ranks, ours, peer in choices:
        row = {"model": name, "ranks": ranks, "ours": ours, "peer": peer}
        row |= compare(name, ranks, ours, peer, options)
        rows.append(row)
        print(row, flush=True)
    report("optimizer_step", rows, options.output, vars(options))
    return 0


def compare(
    model: str, ranks: int, ours: str, peer: str, options: argparse.Namespace
) -> dict[str, object]:
    """Compare two optimizers; returns a row, or a reason why the peer cannot run here."""
    if peer == "torch Muon" and ranks > 1:
        return {"ratio": "one process only"}
    if peer == "dion Muon" and options.dion_path is None:
        return {"ratio": "no --dion-path"}
    by_rank = on_ranks(ranks, model, ours, peer, options)
    # A step ends when its last rank does.
    seconds = {}
    for name in (ours, peer):
        rounds = zip(*(rank["seconds"][name] for rank in by_rank), strict=True)
        seconds[name] = [max(times) for times in rounds]
    ours_bytes, peer_bytes = (max(rank["bytes"][name] for rank in by_rank) for name in (ours, peer))
    return {
        "ratio": ratio(seconds, ours, peer),
        "ours ms": 1e3 * statistics.median(seconds[ours]),
        "peer ms": 1e3 * statistics.median(seconds[peer]),
        "ours bytes": ours_bytes,
        "peer bytes": peer_bytes,
    }


# ---------------------------------------------------------------- contenders


def build(
    name: str,
    module: nn.Module,
    model: DecoderShape,
    mesh: DeviceMesh | None,
    options: argparse.Namespace,
) -> torch.optim.Optimizer:
    """The optimizer of a contender over the matrices of ``module``, all with lr 1e-3, wd 0.1."""
    if name in OURS:
        return _ours(name, module, model, options)
    params = list(module.parameters())
    if name == "torch Muon":
        return _torch(params, options)
    from dion import Muon as DionMuon  # type: ignore[import-not-found]

    return DionMuon(params, distributed_mesh=mesh, lr=1e-3, weight_decay=0.1, nesterov=True)


def within_flops(
    ell_by_type: Mapping[str, float], registry: Sequence[MatrixInfo]
) -> dict[str, Schedule]:
    """Schedules of least projected error within the flops of five steps for each type."""
    units = [
        sum(ns_step_flops(*matrix.shape) for matrix in registry if matrix.operator_type == kind)
        for kind in ell_by_type
    ]
    curves = [error_curve(times_safety(ell), range(3, 8)) for ell in ell_by_type.values()]
    steps = least_error(curves, flop_budget(1.0, units, 5), units)
    pairs = zip(ell_by_type.items(), steps, strict=True)
    return {kind: schedule_for(ell, k) for (kind, ell), k in pairs}


def _ours(name: str, module: nn.Module, model: DecoderShape, options: argparse.Namespace) -> Muon:
    config = MuonConfig(ns_dtype=options.ns_dtype)
    schedules = {kind: schedule_for(1e-3, 5) for kind in ELL_BY_TYPE}
    if name == "ours locked":
        schedules = within_flops(ELL_BY_TYPE, matrices(model))
    return Muon(
        param_groups(module),
        lr=1e-3,
        weight_decay=0.1,
        schedule=Fixed(schedules),
        config=config,
    )


def _torch(params: list[nn.Parameter], options: argparse.Namespace) -> torch.optim.Optimizer:
    """It casts to bfloat16 whatever it gets; for float32 products that cast is taken away."""
    optimizer = torch.optim.Muon(params, lr=1e-3, weight_decay=0.1)
    if options.ns_dtype == "float32":
        step = optimizer.step

        def in_float32() -> None:
            with mock.patch.object(Tensor, "bfloat16", Tensor.float):
                step()

        optimizer.step = in_float32  # type: ignore[method-assign, assignment]
    return optimizer


def shard(module: nn.Module, mesh: DeviceMesh) -> None:
    """Shard parameters and gradients by rows, in place."""
    for part in module.modules():
        for name, weight in part.named_parameters(recurse=False):
            sharded = nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)]))
            sharded.grad = distribute_tensor(weight.grad, mesh, [Shard(0)])
            part.register_parameter(name, sharded)


# ---------------------------------------------------------------- on the ranks


def on_ranks(ranks: int, *args: Any) -> list[dict[str, Any]]:
    """Results of `_time_pair` by rank, in a fresh world."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (ranks, folder, args), nprocs=ranks)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]


def _rank(rank: int, ranks: int, folder: str, args: Sequence[Any]) -> None:
    options = args[-1]
    torch.set_num_threads(1)
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    if options.dion_path is not None:
        sys.path.insert(0, str(options.dion_path))
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    Path(folder, f"{rank}.json").write_text(json.dumps(_time_pair(*args)))
    dist.destroy_process_group()


def _time_pair(model: str, ours: str, peer: str, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds by round and bytes per step of both, on this rank."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,)) if world > 1 else None
    shape = MODELS[model]
    shape = dataclasses.replace(shape, layers=options.layers or shape.layers)
    steps: dict[str, Callable[[], object]] = {}
    for name in (ours, peer):
        module = make_module(shape)
        if mesh is not None:
            shard(module, mesh)
        optimizer = build(name, module, shape, mesh, options)
        steps[name] = lambda optimizer=optimizer: (dist.barrier(), optimizer.step(), dist.barrier())
    seconds = paired(steps, options.rounds, warmup=2)
    sent = {}
    for name, step in steps.items():
        with count_bytes() as counted:
            step()
        sent[name] = counted["bytes"]
    return {"seconds": seconds, "bytes": sent}


# ---------------------------------------------------------------- bytes


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _of_all_to_all_single(rank: int, world: int, args: Sequence[Any]) -> float:
    _, sent, _, splits = (*args, None, None, None, None)[:4]
    own = splits[rank] / max(sum(splits), 1) if splits else 1 / world
    return _size(sent) * (1 - own)


_COUNTERS: Mapping[str, Callable[[int, int, Sequence[Any]], float]] = {
    "all_to_all_single": _of_all_to_all_single,
    "all_to_all": lambda rank, world, args: sum(
        _size(part) for peer, part in enumerate(args[1]) if peer != rank
    ),
    # A rank's own part goes to every other.
    "all_gather": lambda rank, world, args: (world - 1) * _size(args[1]),
    "all_gather_into_tensor": lambda rank, world, args: (world - 1) * _size(args[1]),
    # A ring sends every byte but its own share twice.
    "all_reduce": lambda rank, world, args: 2 * (world - 1) / world * _size(args[0]),
    "reduce_scatter_tensor": lambda rank, world, args: (world - 1) / world * _size(args[1]),
}


@contextlib.contextmanager
def count_bytes() -> Iterator[dict[str, float]]:
    """Counts the bytes that leave this rank through collectives of the whole world."""
    counted = {"bytes": 0.0}
    rank, world = dist.get_rank(), dist.get_world_size()
    originals = {name: getattr(dist, name) for name in _COUNTERS}

    def wrap(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counted["bytes"] += _COUNTERS[name](rank, world, args) if world > 1 else 0
            return originals[name](*args, **kwargs)

        return call

    with mock.patch.multiple(dist, **{name: wrap(name) for name in originals}):
        yield counted


if __name__ == "__main__":
    raise SystemExit(main())
