"""Does the best rate of one width hold for others? ``python -m benchmarks.width_transfer``.

The decoder of `benchmarks.plan_quality` in several widths at one depth, trained by Muon with each
``adjust_lr`` at rates a factor of two apart. AdamW's parameters (embedding, head, norms) have one
rate at all widths, weights begin with one standard deviation, and nothing decays.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from amo_dist import Muon, MuonConfig, param_groups
from benchmarks.measure import report
from benchmarks.plan_quality.data import Corpus, batches, load, standard_library
from benchmarks.plan_quality.model import Architecture, Decoder
from benchmarks.plan_quality.settings import Settings
from benchmarks.plan_quality.train import evaluate, take_step

SETTINGS = Settings(sequence=64, warmup=10, validation_batches=32)
ADAMW_RATE = 4e-3
RATES = {
    "match_rms_adamw": (4e-3, 8e-3, 16e-3, 32e-3, 64e-3),
    "original": (1e-2, 2e-2, 4e-2, 8e-2, 16e-2),
    "spectral": (1e-2, 2e-2, 4e-2, 8e-2, 16e-2),
}
"""Learning rates of Muon by ``adjust_lr``; the last two multiply updates by less."""
WIDTHS, HEAD_DIM, NUM_LAYERS, SEED = (32, 64, 128), 16, 2, 0


def train(width: int, scale: str, rate: float, steps: int, corpus: Corpus) -> float:
    """Validation loss a token after a run."""
    heads = width // HEAD_DIM
    sizes = Architecture(heads, heads, width, 3 * width, NUM_LAYERS, HEAD_DIM)
    torch.manual_seed(SEED)
    model = Decoder(sizes)
    config = MuonConfig(adjust_lr=scale, ns_dtype="float32", ns_guard_every=0)
    optimizer = Muon(param_groups(model), rate, 0.0, config=config)
    stream = batches(corpus.train, SETTINGS.batch, SETTINGS.sequence, SEED)
    for step, batch in enumerate(islice(stream, steps), start=1):
        for group in optimizer.param_groups:
            peak = rate if group["algorithm"] == "muon" else ADAMW_RATE
            group["lr"] = peak * SETTINGS.rate_at(step, steps)
        take_step(model, optimizer, batch, SETTINGS)
        optimizer.zero_grad()
    return evaluate(model, corpus, SETTINGS)


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.width_transfer")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(args)
    torch.set_num_threads(1)
    corpus = load(standard_library())
    rows: list[dict[str, Any]] = []
    begun = time.process_time()
    for width in WIDTHS:
        for scale, rates in RATES.items():
            losses = {rate: train(width, scale, rate, options.steps, corpus) for rate in rates}
            numbered = {f"loss {i}": loss for i, loss in enumerate(losses.values())}
            best = min(losses, key=losses.__getitem__)
            about = {"adjust_lr": scale, "width": width, "rates": list(rates)}
            rows.append({**about, **numbered, "best rate": best})
    settings = {
        "seed": SEED,
        "steps": options.steps,
        "tokens_a_step": SETTINGS.batch * SETTINGS.sequence,
        "adamw_rate": ADAMW_RATE,
        "corpus": corpus.digest,
        "cpu_seconds": round(time.process_time() - begun),
    }
    report("width_transfer", rows, options.output, settings)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
