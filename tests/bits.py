"""Trains small models and prints hashes of what came out: same hashes, same bits.

``python -m tests.bits``; ``--json FILE`` writes the hashes, ``--against FILE`` compares with those
of an earlier run and exits with 1 where one differs. A refactoring shows with it that it changed no
bit: run it with the code before and the code after, on one machine.

Each run has two SHA-256, of the whole parameters and of the optimizer's state: names, dtypes,
shapes and bytes. A step of it has no gradient for one matrix, another a NaN, a third one is
followed by a resume; learning rates fall.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amo_dist import ROOT, AdaMuon, Fused, Muon, NorMuon
from tests import runs
from tests.distributed import models
from tests.distributed.harness import Ranks
from tests.distributed.twin import set_gradients

NUM_RANKS = 3
NUM_STEPS, MISSING_AT, NAN_AT, RESUMED_AT = 12, 3, 5, 6
GPT = {
    "wte.weight": (40, 24),
    "layers.0.attn.c_attn.weight": (72, 24),
    "layers.0.attn.c_attn.bias": (72,),
    "layers.0.mlp.c_fc.weight": (96, 24),
    "layers.1.attn.c_attn.weight": (24, 80),
    "layers.1.attn.c_proj.weight": (24, 48),
    "layers.1.moe.experts.w1": (4, 20, 24),
    "layers.1.moe.experts.w2": (4, 24, 20),
}
GROUPED_QUERY = Fused(
    (("attn_q", 48), ("attn_k", 16), ("attn_v", 16)), dim=1, groups=2, heads={"attn_q": 4}
)
# Large enough for the Gram form.
WIDE = {
    "layers.0.attention.wq.weight": (512, 512),
    "layers.0.attention.wk.weight": (128, 512),
    "layers.0.feed_forward.w1.weight": (1536, 512),
    "layers.0.feed_forward.w2.weight": (512, 1536),
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "shapes": models.shapes(),
        "groups": {"no_decay": [r".*norm\.weight"], "lr_multipliers": {r".*wo\.weight": 0.5}},
    },
    "gpt": {
        "shapes": GPT,
        "groups": {"patterns": {r"layers\.1\.attn\.c_attn\.weight": GROUPED_QUERY}},
    },
    "wide": {"shapes": WIDE},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "uniform": {"kind": Muon},
    "pe": {"kind": functools.partial(Muon, schedule="pe"), "nesterov": False},
    "amo": {"sample_size": 1},
    "amo as in the paper": {"planner": "paper"},
    **{kind.__name__: {"kind": kind} for kind in (AdaMuon, NorMuon, ROOT)},
}
FIELDS = {"ns_guard_every": 3, "bucket_bytes": 8192, "nonfinite": "skip_step"}
RUNS = [
    *(("llama", name, "one", dtype) for name in OPTIMIZERS for dtype in ("float32", "bfloat16")),
    *(("gpt", name, layout, "float32") for name in OPTIMIZERS for layout in ("fsdp", "plain")),
    *(("llama", name, "fsdp", "bfloat16") for name in ("uniform", "amo", "AdaMuon")),
    *(("wide", "amo", layout, "bfloat16") for layout in ("one", "fsdp")),
]
"""Model, optimizer, layout and dtype: ``one`` process, or ``NUM_RANKS``."""


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, dtypes, shapes and bytes."""
    result = hashlib.sha256()
    for name, tensor in tensors.items():
        result.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        result.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return result.hexdigest()


def train(rank: int, world_size: int, model_name: str, name: str, layout: str, dtype: str) -> Any:
    """Hashes of a run, on every rank."""
    logging.disable(logging.WARNING)  # of the gradient that is missing, and of the one with a NaN
    options = {**MODELS[model_name], **OPTIMIZERS[name], **FIELDS, "ns_dtype": dtype}
    make = functools.partial(runs.make, layout.replace("one", "plain"), **options)
    model, optimizer = make()
    for step in range(1, NUM_STEPS + 1):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / step
        set_gradients(model, step)
        param = next(param for own, param in model.named_parameters() if "0.att" in own)
        assert param.grad is not None
        if step == NAN_AT:
            param.grad.fill_(torch.nan)
        if step == MISSING_AT:
            param.grad = None
        optimizer.step()
        if step == RESUMED_AT:
            model, optimizer = runs.resume(model, optimizer, make)
    states = {
        f"{name}.{key}": models.whole(value)
        for name, param in model.named_parameters()
        for key, value in sorted(optimizer.state[param].items())
    }
    logging.disable(logging.NOTSET)
    return {"parameters": digest(runs.weights(model)), "state": digest(states)}


def main() -> int:
    """Trains all, and compares; 1 where anything differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.bits", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the hashes here")
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare with these hashes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    hashes: dict[str, dict[str, str]] = {}
    with contextlib.closing(Ranks()) as ranks:
        for run in RUNS:
            results = ranks(1 if run[2] == "one" else NUM_RANKS)(train, *run)
            assert all(result == results[0] for result in results), "ranks ended with other bits"
            hashes[" ".join(run)] = results[0]
            print(" ".join(run), *results[0].values(), flush=True)
    if options.json:
        options.json.write_text(json.dumps(hashes, indent=1) + "\n")
    before = json.loads(options.against.read_text()) if options.against else hashes
    differing = [
        f"{run}: {field} differs"
        for run, fields in hashes.items()
        for field, value in fields.items()
        if value != before.get(run, {}).get(field)
    ]
    print("\n".join(differing) or f"all {len(hashes)} runs have the same bits")
    return int(bool(differing))


if __name__ == "__main__":
    raise SystemExit(main())
