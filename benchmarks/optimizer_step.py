"""One optimizer step: ours beside its peers; time, bytes sent and peak memory.

``python -m benchmarks.optimizer_step``. Every contender meets ours in a world of gloo processes of
its own, on the same matrices and gradients; the two take turns, and the ratio is the median over
rounds. Parameters are sharded by rows over all ranks (DTensor), except for KellerJordan/Muon, which
replicates them. Peers that are not part of PyTorch are imported where their root is given:
``--dion-path`` (microsoft/dion), ``--keller-path`` (KellerJordan/Muon).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import resource
import statistics
import sys
import tempfile
import traceback
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
from benchmarks.overhead import Matrices, set_gradients
from benchmarks.shapes import ELL_BY_TYPE, MODELS, DecoderShape

OURS = ("ours uniform", "ours locked")
PEERS = ("torch Muon", "dion Muon", "keller Muon", "AdamW")
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
    parser.add_argument("--param-dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--ns-dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--dion-path", type=Path)
    parser.add_argument("--keller-path", type=Path)
    parser.add_argument("--compile-peers", action="store_true", help="let peers torch.compile")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(args)
    rows = []
    for name in options.models:
        for ranks in options.ranks:
            for ours in options.ours:
                for peer in options.peers:
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
    reason = _unavailable(peer, ranks, options)
    if reason:
        return {"ratio": reason}
    paired_run = _run(ranks, _time_pair, model, ours, peer, options)
    memory = {name: max(_run(ranks, _peak_memory, model, name, options)) for name in (ours, peer)}
    ours_bytes, peer_bytes = (
        max(rank["bytes"][name] for rank in paired_run) for name in (ours, peer)
    )
    # A step ends when its last rank does; on one CPU clock, work is summed over ranks.
    combine = max if options.clock == "wall" else sum
    seconds = {
        name: [combine(seconds) for seconds in _by_round(paired_run, name)] for name in (ours, peer)
    }
    return {
        "ratio": ratio(seconds, ours, peer),
        "ours ms": 1e3 * statistics.median(seconds[ours]),
        "peer ms": 1e3 * statistics.median(seconds[peer]),
        "ours bytes": ours_bytes,
        "peer bytes": peer_bytes,
        "ours peak MiB": memory[ours],
        "peer peak MiB": memory[peer],
    }


def _by_round(runs: Sequence[Mapping[str, Any]], name: str) -> Iterator[tuple[float, ...]]:
    """A contender's seconds on all ranks, round by round."""
    return zip(*(run["seconds"][name] for run in runs), strict=True)


def _unavailable(peer: str, ranks: int, options: argparse.Namespace) -> str:
    if peer == "torch Muon" and ranks > 1:
        return "one process only"
    if peer == "dion Muon" and options.dion_path is None:
        return "no --dion-path"
    if peer == "keller Muon" and options.keller_path is None:
        return "no --keller-path"
    return ""


# ---------------------------------------------------------------- contenders


def build(
    name: str,
    module: nn.Module,
    model: DecoderShape,
    mesh: DeviceMesh | None,
    options: argparse.Namespace,
) -> torch.optim.Optimizer:
    """The optimizer of a contender over the matrices of ``module``, all with lr 1e-3, wd 0.1."""
    params = list(module.parameters())
    if name in OURS:
        return _ours(name, module, model, options)
    if name == "AdamW":
        return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1, foreach=True)
    if name == "torch Muon":
        return _torch(params, options)
    if name == "dion Muon":
        return _dion(params, mesh)
    import muon  # type: ignore[import-not-found]

    if dist.get_world_size() == 1:
        return muon.SingleDeviceMuon(params, lr=1e-3, weight_decay=0.1)
    return muon.Muon(params, lr=1e-3, weight_decay=0.1)


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
        schedules = within_flops(ELL_BY_TYPE, model.matrices())
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


def _dion(params: list[nn.Parameter], mesh: DeviceMesh | None) -> torch.optim.Optimizer:
    from dion import Muon as DionMuon  # type: ignore[import-not-found]

    return DionMuon(params, distributed_mesh=mesh, lr=1e-3, weight_decay=0.1, nesterov=True)


def make_module(
    name: str, model: DecoderShape, mesh: DeviceMesh | None, dtype: torch.dtype
) -> nn.Module:
    """The matrices with gradients, sharded by rows unless the contender replicates."""
    module = Matrices(model, dtype)
    set_gradients(module)
    if mesh is None or name == "keller Muon":
        return module
    for part in module.modules():
        weight = part._parameters.get("weight")
        if weight is not None:
            sharded = nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)]))
            sharded.grad = distribute_tensor(weight.grad, mesh, [Shard(0)])
            part.weight = sharded
    return module


# ---------------------------------------------------------------- on the ranks


def _time_pair(model: str, ours: str, peer: str, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds by round and bytes per step of both, on this rank."""
    mesh = _mesh()
    steps: dict[str, Callable[[], object]] = {}
    for name in (ours, peer):
        shape = _model(model, options)
        module = make_module(name, shape, mesh, getattr(torch, options.param_dtype))
        optimizer = build(name, module, shape, mesh, options)
        steps[name] = lambda optimizer=optimizer: (_barrier(), optimizer.step(), _barrier())
    seconds = paired(steps, options.rounds, clock=options.clock, warmup=2)
    sent = {}
    for name, step in steps.items():
        with count_bytes() as counted:
            step()
        sent[name] = counted["bytes"]
    return {"seconds": seconds, "bytes": sent}


def _peak_memory(model: str, name: str, options: argparse.Namespace) -> float:
    """MiB that two steps add at their peak to what parameters and gradients take."""
    mesh = _mesh()
    shape = _model(model, options)
    module = make_module(name, shape, mesh, getattr(torch, options.param_dtype))
    gc.collect()
    before = _resident()
    _reset_peak()
    optimizer = build(name, module, shape, mesh, options)
    for _ in range(2):
        optimizer.step()
    return (_peak() - before) / 2**20


def _model(name: str, options: argparse.Namespace) -> DecoderShape:
    import dataclasses

    model = MODELS[name]
    return dataclasses.replace(model, layers=options.layers or model.layers)


def _mesh() -> DeviceMesh | None:
    world = dist.get_world_size()
    return init_device_mesh("cpu", (world,)) if world > 1 else None


def _barrier() -> None:
    if dist.get_world_size() > 1:
        dist.barrier()


def _resident() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * resource.getpagesize()


def _reset_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


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

    for name in originals:
        setattr(dist, name, wrap(name))
    try:
        yield counted
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


# ---------------------------------------------------------------- processes


def _run(ranks: int, case: Callable[..., Any], *args: Any) -> list[Any]:
    """What ``case`` returns on each rank of a fresh world."""
    context = mp.get_context("spawn")
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_rank, args=(rank, ranks, folder, answers, case, args))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        answer_by_rank = dict(answers.get() for _ in processes)
        for process in processes:
            process.join()
    failed = {rank: answer[1] for rank, answer in answer_by_rank.items() if not answer[0]}
    if failed:
        raise RuntimeError("\n".join(f"on rank {rank}:\n{text}" for rank, text in failed.items()))
    return [answer_by_rank[rank][1] for rank in range(ranks)]


def _rank(
    rank: int, ranks: int, folder: str, answers: Any, case: Callable[..., Any], args: Sequence[Any]
) -> None:
    options = args[-1]
    torch.set_num_threads(options.threads)
    if not options.compile_peers:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    for path in (options.dion_path, options.keller_path):
        if path is not None:
            sys.path.insert(0, str(path))
    try:
        store = dist.FileStore(f"{folder}/store", ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        answers.put((rank, (True, case(*args))))
    except Exception:
        answers.put((rank, (False, traceback.format_exc())))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    raise SystemExit(main())
