"""What cutting is worth: a weight that holds several matrices, orthogonalized as one or apart.

``python -m benchmarks.plan_quality.cutting run`` trains what has no record yet, in the order of
`jobs`, and may be stopped at any time; ``report`` prints the tables as Markdown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from amo_dist import Muon, MuonConfig, param_groups
from amo_dist.schedule.polar_express import schedule_for
from benchmarks.plan_quality import data, fused, study, train
from benchmarks.plan_quality.model import Architecture, Attention, Decoder
from benchmarks.plan_quality.rows import BASE_ELL, BASE_STEPS
from benchmarks.plan_quality.settings import Settings
from benchmarks.tables import plus_minus

RECORDS = Path(__file__).resolve().parents[1] / "results" / "cutting" / "runs.jsonl"
SIZES = {"num_heads": 4, "num_kv_heads": 4, "dim": 96, "num_layers": 2, "head_dim": 24}
MULTI_HEAD = Architecture(**SIZES, ffn_dim=256)
GROUPED = replace(MULTI_HEAD, num_kv_heads=2)
EIGHT_EXPERTS = replace(MULTI_HEAD, ffn_dim=384)
RATES = (0.008, 0.004, 0.016)
"""Rates at 250 steps, in the order in which they are tried."""
SEEDS = 5
IMAGES = 32
"""Images of a batch: as many tokens as the decoders' batches have."""
TODAY, HEADS, TWICE = "today's", "q, k, v per head", "q, k, v at twice the rate"


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A way of seeing a model.

    Attributes:
        matrices: Number of matrices in a block.
        options: Arguments of `amo_dist.param_groups`.
    """

    matrices: int
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def pattern(expression: str, target: str) -> dict[str, Any]:
    return {"patterns": {expression: target}}


QKV = pattern(r".*\.wqkv\.weight", "attn_qkv")
MODULATION = r".*\.modulation\.weight"
ROWS = {
    "multi-head": {
        TODAY: Row(7),
        "q, k, v as one": Row(5, QKV),
        HEADS: Row(16, {"per_head": True}),
        TWICE: Row(7, {"lr_multipliers": {r".*\.wqkv\.weight": 2.0}}),
        "gate and up as one": Row(6, pattern(r".*\.gate_up_proj\.weight", "mlp_gate_up")),
    },
    "mixture": {
        TODAY: Row(28),
        "experts as one": Row(7, pattern(r".*\.experts\.w\d", "expert")),
        HEADS: Row(37, {"per_head": True}),
    },
    "diffusion": {
        TODAY: Row(13),
        "modulation as one": Row(8, pattern(MODULATION, "modulation")),
        "modulation on AdamW": Row(7, pattern(MODULATION, "adamw")),
        "modulation on AdamW, rate / 8": Row(
            7, {**pattern(MODULATION, "adamw"), "lr_multipliers": {MODULATION: 1 / 8}}
        ),
        "q, k, v as one": Row(11, QKV),
        HEADS: Row(22, {"per_head": True}),
    },
}
"""Rows of each model, today's first."""
ROWS["grouped"] = {**ROWS["multi-head"], HEADS: Row(12, {"per_head": True})}


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One run; its record is the same fields and the validation loss."""

    model: str
    row: str
    rate: float = 0.0
    seed: int = 0
    steps: int = 250


Records = dict[Run, float]


def read(path: Path) -> Records:
    """Validation loss of each run."""
    return study.read(path, lambda fields: Run(**fields))


def bracket(records: Records, like: Run) -> Iterator[Run]:
    """Runs at half the least rate or twice the greatest one, until the best lies between others."""
    while True:
        best = study.best_rate(records, like)
        runs = [replace(like, rate=rate) for rate in (best / 2, best * 2)]
        missing = [run for run in runs if run not in records]
        if not missing:
            return
        yield missing[0]


def jobs(records: Records) -> Iterator[Run]:
    """All runs, the short ones first, each row once before any row's next run.

    Rates depend on the losses in ``records``, which grows while this is consumed.
    """
    likes = [Run(model, row) for model in ROWS for row in ROWS[model]]
    yield from (replace(like, rate=rate) for rate in RATES for like in likes)
    yield from chain.from_iterable(bracket(records, like) for like in likes)
    yield from _seeds(records, likes)
    longer = [replace(like, steps=2000) for like in likes]
    for factor, like in product((0.5, 0.25), likes):
        yield replace(like, rate=factor * study.best_rate(records, like), steps=2000)
    yield from chain.from_iterable(bracket(records, like) for like in longer)
    yield from _seeds(records, longer)


def _seeds(records: Records, likes: Sequence[Run]) -> Iterator[Run]:
    """More seeds at the best rate of the first."""
    for seed, like in product(range(1, SEEDS), likes):
        yield replace(like, rate=study.best_rate(records, like), seed=seed)


def build(name: str) -> nn.Module:
    """A model with random weights."""
    if name == "diffusion":
        return fused.DiffusionTransformer(MULTI_HEAD)
    if name == "mixture":
        return Decoder(EIGHT_EXPERTS, Attention, fused.Mixture)
    sizes = GROUPED if name == "grouped" else MULTI_HEAD
    return Decoder(sizes, fused.FusedAttention, fused.PackedFeedForward)


def groups_of(model: nn.Module, row: Row) -> list[dict[str, Any]]:
    """Parameter groups of a row, which hold as many matrices as it says."""
    groups = param_groups(model, **row.options)
    views = [view for group in groups for view in group.get("matrix_views", {}).values()]
    assert sum(map(len, views)) == row.matrices * len(model.layers)  # type: ignore[arg-type]
    return groups


def batches(name: str, corpus: data.Corpus, seed: int) -> Iterator[Sequence[Tensor]]:
    """Endless batches of a model, for validation with its seed."""
    if name == "diffusion":
        return fused.images(IMAGES, seed)
    is_validation = seed == train.VALIDATION_SEED
    tokens = corpus.validation if is_validation else corpus.train
    return data.batches(tokens, Settings().batch, Settings().sequence, seed)


def validation_loss(run: Run, corpus: data.Corpus) -> float:
    """Train one run; the loss at its end."""
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    settings, model = Settings(), build(run.model)
    groups = groups_of(model, ROWS[run.model][run.row])
    schedule = schedule_for(BASE_ELL, BASE_STEPS)
    config = MuonConfig(ns_dtype="float32", update_norm="exact", ns_guard_every=0)
    optimizer = Muon(groups, run.rate, settings.weight_decay, schedule=schedule, config=config)
    stream = islice(batches(run.model, corpus, run.seed), run.steps)
    for step, batch in enumerate(stream, start=1):
        for group in optimizer.param_groups:
            group["lr"] = run.rate * settings.rate_at(step, run.steps)
        train.take_step(model, optimizer, batch, settings)
        optimizer.zero_grad()
    stream = batches(run.model, corpus, train.VALIDATION_SEED)
    return train.mean_loss(model, islice(stream, settings.validation_batches))


def report(records: Records) -> Iterator[str]:
    """Tables: each row at each rate, and each row against today's at the best of both."""
    for steps in sorted({run.steps for run in records}):
        for model in ROWS:
            yield f"\n### {model}, {steps} steps\n"
            named = {row: Run(model, row, steps=steps) for row in ROWS[model]}
            yield study.table(records, named, named[TODAY], "row")
            if TWICE in named:
                pairs = study.differences(records, named[HEADS], named[TWICE])
                yield f"\n{HEADS} less {TWICE}: {plus_minus(pairs, '+')}"


def main(args: Sequence[str] | None = None) -> int:
    return study.main("cutting", RECORDS, read, jobs, validation_loss, report, args)


if __name__ == "__main__":
    raise SystemExit(main())
