"""Validation loss of AdamW, ``torch.optim.Muon``, Muon-PE and AMO, each at the best of its rates.

``python -m benchmarks.compare_optimizers`` trains a small Qwen3 (Hugging Face's, random weights)
under FSDP2 on two CPU ranks, on the bytes of Python's standard library. Every optimizer first tries
its rates with the first seed; the best of them runs with the other seeds, too. What was run is in
the JSON and is not run again. A picture of the curves lies beside the JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from benchmarks.plan_quality.data import Corpus, batches, load, standard_library
from benchmarks.plan_quality.settings import Settings
from benchmarks.tables import markdown

RESULTS = Path(__file__).resolve().parent / "results" / "compare_optimizers.json"
RATES = {
    "AdamW": (5e-4, 1e-3, 2e-3, 4e-3, 8e-3),
    "torch.optim.Muon": (4e-3, 8e-3, 1.6e-2),
    "Muon-PE": (4e-3, 8e-3, 1.6e-2),
    "AMO": (4e-3, 8e-3, 1.6e-2),
}
"""Peak learning rates to try. All Muons scale updates to the size of AdamW's."""
RANKS, BATCH, SEQUENCE, EVERY, VALIDATION_BATCHES = 2, 16, 128, 20, 8
"""Ranks; sequences of a step over all ranks; tokens of a sequence; steps between validations."""
BETAS, SETTINGS = (0.9, 0.95), Settings()


def build_model(seed: int) -> nn.Module:
    """A Qwen3 of 2 M parameters, the same on each rank, sharded by layer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=257,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=SEQUENCE,
    )
    model = Qwen3ForCausalLM(config)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def build_optimizers(
    name: str, model: nn.Module, rate: float, steps: int
) -> list[torch.optim.Optimizer]:
    """The optimizers that train a model together."""
    from amo_dist import AMO, AMOConfig, MuonConfig, make_optimizer, param_groups

    options: dict[str, Any] = {"lr": rate, "weight_decay": SETTINGS.weight_decay}
    if name == "AdamW":
        return [torch.optim.AdamW(model.parameters(), betas=BETAS, **options)]
    groups = param_groups(model)
    if name == "AMO":
        return [AMO(groups, config=AMOConfig.for_run(steps, ns_dtype="float32"), **options)]
    if name == "Muon-PE":
        return [make_optimizer(name, groups, config=MuonConfig(ns_dtype="float32"), **options)]
    matrices, others = ([param for _, param in group["params"]] for group in groups)
    muon = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", momentum=0.95, **options)
    return [muon, torch.optim.AdamW(others, betas=BETAS, **options)]


def factor(step: int, steps: int) -> float:
    """The rate of a step, counted from 0, over the peak: warm-up, then a cosine to a tenth."""
    # The first step of the warm-up has a rate, too.
    return SETTINGS.rate_at(max(step, min(step + 1, SETTINGS.warmup)), steps)


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor, rank: int) -> Tensor:
    """Mean loss of this rank's part of a batch."""
    part = slice(rank * len(inputs) // RANKS, (rank + 1) * len(inputs) // RANKS)
    logits = model(input_ids=inputs[part]).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets[part].flatten())


def train(
    name: str, rate: float, seed: int, steps: int, corpus: Corpus, rank: int
) -> dict[str, float]:
    """Validation loss by step; a collective over both ranks."""
    model = build_model(seed)
    optimizers = build_optimizers(name, model, rate, steps)
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(step, steps))
        for optimizer in optimizers
    ]
    held_out = list(
        itertools.islice(batches(corpus.validation, BATCH, SEQUENCE, 0), VALIDATION_BATCHES)
    )
    curve: dict[str, float] = {}
    data = batches(corpus.train, BATCH, SEQUENCE, seed)
    for step, (inputs, targets) in enumerate(itertools.islice(data, steps), start=1):
        loss_of(model, inputs, targets, rank).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), SETTINGS.max_norm)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if step % EVERY == 0 or step == steps:
            with torch.no_grad():
                losses = [loss_of(model, *batch, rank) for batch in held_out]
            total = torch.stack(losses).mean()
            dist.all_reduce(total)
            curve[str(step)] = total.item() / RANKS
    return curve


def work(rank: int, store: str, options: argparse.Namespace) -> None:
    """One rank: all runs that the JSON lacks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    corpus = load(standard_library())
    path: Path = options.output
    runs: dict[str, Any] = json.loads(path.read_text())["runs"] if path.exists() else {}
    for name in RATES:
        tried = [(name, rate, 0) for rate in RATES[name]]
        for key in itertools.chain(tried, ((name, best(runs, name), s) for s in (1, 2))):
            text = " ".join(map(str, key))
            if text in runs:
                continue
            runs[text] = train(*key, options.steps, corpus, rank)
            dist.barrier()  # the first rank has read the file before it changes
            if rank == 0:
                print(f"{text}: {final(runs[text]):.4f}", flush=True)
                about = {"steps": options.steps, "torch": torch.__version__}
                record = {**about, "machine": platform.machine(), "runs": runs}
                path.write_text(json.dumps(record, indent=1) + "\n")
    dist.destroy_process_group()


def final(curve: dict[str, float]) -> float:
    return list(curve.values())[-1]


def best(runs: dict[str, Any], name: str) -> float:
    """The rate of an optimizer whose run with the first seed ends lowest."""
    rates = [rate for rate in RATES[name] if f"{name} {rate} 0" in runs]
    return min(rates, key=lambda rate: final(runs[f"{name} {rate} 0"]))


def curves_at_best(runs: dict[str, Any], name: str) -> list[dict[str, float]]:
    start = f"{name} {best(runs, name)} "
    return [curve for key, curve in runs.items() if key.startswith(start)]


def table(runs: dict[str, Any]) -> str:
    """Final loss at the best rate, mean and range over seeds, as Markdown."""
    rows = []
    for name in RATES:
        losses = [final(curve) for curve in curves_at_best(runs, name)]
        mean, spread = statistics.mean(losses), f"{min(losses):.3f} to {max(losses):.3f}"
        rows.append([name, f"{best(runs, name):g}", f"{mean:.3f}", spread, len(losses)])
    return markdown(["optimizer", "best rate", "validation loss", "least to most", "seeds"], rows)


def plot(runs: dict[str, Any], path: Path) -> None:
    """Mean validation loss by step, each optimizer at its best rate."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    for name in RATES:
        curves = curves_at_best(runs, name)
        steps = [int(step) for step in curves[0]]
        means = [statistics.mean(curve[str(step)] for curve in curves) for step in steps]
        axes.plot(steps, means, label=f"{name}, rate {best(runs, name):g}")
    axes.set(xlabel="step", ylabel="validation loss", ylim=(None, 3.0))
    axes.legend()
    figure.savefig(path, dpi=150)


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare_optimizers")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(args)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (f"{folder}/store", options), nprocs=RANKS)
    runs = json.loads(options.output.read_text())["runs"]
    print(table(runs))
    plot(runs, options.output.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
