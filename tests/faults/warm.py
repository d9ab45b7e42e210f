"""Imported by the process that ranks are forked from: what a first run imports and caches."""

from __future__ import annotations

import atexit
import gc
import logging
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from tests.faults.worker import Run, train


def _train_once() -> None:
    torch.set_num_threads(1)  # no threads, which a fork would lose
    level = logging.getLogger().level
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        folder = Path(name)
        dist.init_process_group("gloo", init_method=f"file://{folder}/s", rank=0, world_size=1)
        for layout in ("fsdp", "tp"):
            train(0, 1, Run(1, layout, 6), folder / layout)
        train(0, 1, Run(1, "fsdp", 6), folder / "fsdp")  # resumes
        dist.destroy_process_group()
    logging.getLogger().setLevel(level)  # ranks of tests are to be heard
    gc.collect()
    atexit.register(gc.unfreeze)
    gc.freeze()  # or the children's first collection would copy all pages


_train_once()
