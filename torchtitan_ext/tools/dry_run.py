"""Two real steps of a config as one of many ranks, whose collectives torchtitan fakes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from torchtitan_ext import train

STEPS = 2
SEQUENCE = 64
"""Most tokens of a sequence on a CPU, where the length and the batch of a run would take hours."""


def dry_run(config: Any, world_size: int) -> dict[str, Any]:
    """Train two steps as rank 0 of a world, in a process of its own.

    Model, layout, optimizer, compilation and loss are those of the config. Its text is the standard
    library's, collectives return at once without the data of other ranks, and nothing is saved. On
    a CPU sequences are short, and there is one of them.

    Args:
        config: A complete config without mistakes.
        world_size: Number of ranks.

    Returns:
        Figures of the last step: loss, gradient norm, phase, bytes of memory at the peak, and those
        that the optimizer's exchange sent, 0 for AdamW.

    Raises:
        ValueError: The steps failed; the message is the last line of the error.
    """
    from torchtitan_ext.config import settings, values
    from torchtitan_ext.plugin import machine
    from torchtitan_ext.runs.run_files import read_metrics

    with tempfile.TemporaryDirectory(prefix="amo-dry-run-") as folder:
        changes: dict[str, Any] = {
            "dump_folder": folder,
            "comm": {"mode": "fake_backend"},
            "training": {"steps": STEPS, "global_batch_size": -1},
            "lr_scheduler": {"warmup_steps": 1, "total_steps": None},
            "checkpoint": {"enable": False, "load_only": False},
            "metrics": {"log_freq": 1, "enable_tensorboard": False, "enable_wandb": False},
            "validator": {"enable": False},
            "optimizer": {"allow_unlocked": True},
            "tokenizer": {"kind": "byte"},
            "dataloader": {"dataset": "stdlib", "dataset_path": None},
        }
        if machine.cpu_is_needed():
            seq_len = min(SEQUENCE, config.training.seq_len)
            changes["training"] |= {"seq_len": seq_len}
            if config.parallelism.pipeline_parallel_degree == 1:  # stages need their microbatches
                changes["training"] |= {"local_batch_size": 1}
            changes["compile"] = {"backend": "eager"}  # traced whole, without minutes of C++
        short = values.overlay(config, changes)
        ranks = {"NGPU": str(world_size), "WORLD_SIZE": str(world_size)}
        done = subprocess.run(
            [sys.executable, "-m", "torchtitan_ext.tools.dry_run", *settings.for_ranks(short)],
            env={**os.environ, **ranks, "RANK": "0", "LOCAL_RANK": "0"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode:
            last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
            raise ValueError(f"dry run: {' '.join(last) or f'status {done.returncode}'}")
        record = read_metrics(Path(folder)).steps[-1]
    figures = {name: record[name] for name in ("loss", "grad_norm", "phase", "peak_memory_bytes")}
    return {**figures, "sent_bytes": record["optimizer"].get("exchange/sent_bytes", 0)}


def _let_ranks_send_nothing() -> None:
    """Replace an exchange that sends nothing, which PyTorch's fake backend refuses.

    A rank that owns no matrix of a bucket sends no result of it. Instead it sends itself what it
    would receive; the fake backend moves no data between ranks anyway.
    """
    exchange = dist.all_to_all_single

    def all_to_all_single(
        received: Tensor,
        sent: Tensor,
        received_sizes: list[int] | None = None,
        sent_sizes: list[int] | None = None,
        **options: Any,
    ) -> Any:
        if not sent.numel():
            sent, sent_sizes = received, received_sizes
        return exchange(received, sent, received_sizes, sent_sizes, **options)

    dist.all_to_all_single = all_to_all_single  # type: ignore[assignment]


if __name__ == "__main__":
    _let_ranks_send_nothing()
    sys.exit(train.main())
