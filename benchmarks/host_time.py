"""Host time of a locked step on one of 32 ranks: ours beside Dion's Muon, in turns.

``python -m benchmarks.host_time --dion-path DION``. The matrices are those of Qwen3-1.7B in number
and kind, but so narrow that the host's work is what counts; the group's collectives move nothing.
Neither side is compiled. The ratio is the median over rounds, in CPU seconds of this process.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from amo_dist import Muon, MuonConfig, param_groups
from amo_dist.engine import step as engine
from amo_dist.kernels import elementwise, newton_schulz
from benchmarks.launches import NARROWER, RANKS, make_module
from benchmarks.measure import paired, ratio, report


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_time", description=__doc__)
    parser.add_argument("--dion-path", type=Path, help="checkout of microsoft/dion")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(args)
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    contenders = {"ours": ours(make_module(mesh, torch.float32))}
    if options.dion_path is not None:
        sys.path.insert(0, str(options.dion_path))
        contenders["dion"] = dion(make_module(mesh, torch.float32), mesh)
    seconds = paired(contenders, options.rounds, clock="cpu", warmup=3)
    row: dict[str, object] = {
        f"{name} ms": 1e3 * statistics.median(times) for name, times in seconds.items()
    }
    if "dion" in seconds:
        row["ours over dion"] = ratio(seconds, "ours", "dion")
    report("host_time", [row], options.output, vars(options))
    dist.destroy_process_group()
    return 0


def ours(module: nn.Module) -> Callable[[], None]:
    """A step of ours, with the buckets of the whole model."""
    config = MuonConfig(
        ns_dtype="bfloat16",
        ns_guard_every=0,
        bucket_bytes=MuonConfig().bucket_bytes // NARROWER**2,
    )
    optimizer = Muon(param_groups(module), lr=1e-3, config=config)

    def step() -> None:
        with contextlib.ExitStack() as stack:
            for module in (elementwise, newton_schulz, engine):
                stack.enter_context(mock.patch.object(module, "on_cpu", never))
            optimizer.step()

    return step


def never(tensor: torch.Tensor) -> bool:
    """`on_cpu` for tensors that stand for those of a device."""
    return False


def dion(module: nn.Module, mesh: DeviceMesh) -> Callable[[], None]:
    """A step of Dion's Muon; AdamW trains the same parameters."""
    from dion import Muon as DionMuon  # type: ignore[import-not-found]

    matrices, others = [], []
    for name, param in module.named_parameters():
        is_matrix = name.startswith("layers.") and param.dim() == 2
        (matrices if is_matrix else others).append(param)
    groups = [{"params": matrices}, {"params": others, "algorithm": "adamw"}]
    optimizer = DionMuon(
        groups, distributed_mesh=mesh, lr=1e-3, mu=0.95, weight_decay=0.1, nesterov=True
    )

    return optimizer.step


if __name__ == "__main__":
    raise SystemExit(main())
