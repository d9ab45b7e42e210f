"""The weight of the fresh gradient: Muon orthogonalizes ``G + weight * B``, ``B = decay * B + G``.

``python -m benchmarks.plan_quality.momentum run`` trains what has no record yet, in the order of
`jobs`, and may be stopped at any time; ``report`` prints the tables as Markdown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, product
from pathlib import Path

import torch

from amo_dist import AMO, AMOConfig, Muon, MuonConfig, param_groups
from amo_dist.schedule.polar_express import schedule_for
from benchmarks.plan_quality import data, study, train
from benchmarks.plan_quality.model import ARCHITECTURES, Decoder
from benchmarks.plan_quality.rows import BASE_ELL
from benchmarks.plan_quality.settings import Settings

RECORDS = Path(__file__).resolve().parents[1] / "results" / "momentum" / "runs.jsonl"
DECAYS, WEIGHTS = (0.95, 0.9, 0.98), (0.95, 0.0, 0.1, 0.2, 0.3, 0.5)
RATES = (0.008, 0.016, 0.004)
"""Rates in the order in which they are tried."""
BETAS = ((0.9, 0.95), (0.9, 0.99), (0.95, 0.95), (0.8, 0.95))
ADAMW_RATES = (0.004, 0.002, 0.008, 0.001)


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """The optimizer of a run, all but its rate.

    Attributes:
        kind: ``muon``, ``amo`` or ``adamw``.
        decay: Decay of the momentum; AdamW's first beta.
        weight: Weight of the momentum beside the fresh gradient; AdamW's second beta.
        ns_steps: Newton-Schulz steps of every type, of Muon.
        first_decay: Decay and weight rise linearly from here over the first 100 steps, or None.
    """

    kind: str = "muon"
    decay: float = 0.95
    weight: float = 0.95
    ns_steps: int = 5
    first_decay: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One run; its record is the same fields and the validation loss."""

    form: Form
    rate: float
    architecture: str
    seed: int = 0
    steps: int = 250
    batch: int = 4
    rate_decay: str = "cosine"


TODAY = Form()
FORMS = [Form(decay=decay, weight=weight) for decay in DECAYS for weight in WEIGHTS]
SCEPTIC = [Form(decay=0.9, weight=0.9), Form(first_decay=0.85), Form(decay=0.8, weight=0.8)]
"""Shorter momentum, and a warm-up of it, by which a gain may be had without another weight."""
Records = dict[Run, float]


def read(path: Path) -> Records:
    """Validation loss of each run."""
    return study.read(path, lambda fields: Run(**fields | {"form": Form(**fields["form"])}))


def best_forms(records: Records, architecture: str) -> list[Form]:
    """The form of the least loss at 250 steps with seed 0, today's aside; none without records."""
    tried = [
        run
        for run in records
        if run == Run(run.form, run.rate, architecture) and run.form in FORMS[1:]
    ]
    return [run.form for run in sorted(tried, key=records.__getitem__)[:1]]


def jobs(records: Records) -> Iterator[Run]:
    """All runs, what decides first: whatever is done at any time is a balanced table.

    Later stages take the best forms and rates of earlier ones from ``records``, which grows while
    this is consumed.
    """
    first, second, third = ARCHITECTURES
    for rate in RATES:
        yield from (Run(form, rate, first) for form in FORMS)
    yield from (Run(form, rate, first) for form in SCEPTIC for rate in RATES)
    chosen = [TODAY, *best_forms(records, first), SCEPTIC[-1]]
    lengths = {(2000, 4): (1.0, 0.5), (250, 16): (1.0, 2.0)}  # longer runs want lower rates
    for architecture in (second, first, third):
        yield from (Run(form, rate, architecture) for form in chosen for rate in RATES)
        for (steps, batch), factors in lengths.items():
            for form, factor in product(chosen, factors):
                rate = study.best_rate(records, Run(form, RATES[0], architecture)) * factor
                yield Run(form, rate, architecture, steps=steps, batch=batch)
    for steps in (250, 1000):
        for base in chosen:
            for form in (replace(base, ns_steps=3), replace(base, kind="amo")):
                rate = study.best_rate(records, Run(base, RATES[0], first))
                yield Run(form, rate, first, steps=steps)
    for rate in ADAMW_RATES:
        yield from (Run(Form("adamw", *betas), rate, first) for betas in BETAS)
    for seed in (1, 2):
        for architecture in ARCHITECTURES:
            for form in chosen:
                rate = study.best_rate(records, Run(form, RATES[0], architecture))
                yield Run(form, rate, architecture, seed=seed)
    yield from (
        Run(form, study.best_rate(records, Run(form, RATES[0], first)), first, rate_decay="linear")
        for form in chosen
    )


def build(model: Decoder, run: Run) -> torch.optim.Optimizer:
    """The optimizer of a run."""
    form, options = run.form, {"lr": run.rate, "weight_decay": Settings().weight_decay}
    if form.kind == "adamw":
        return torch.optim.AdamW(model.parameters(), betas=(form.decay, form.weight), **options)
    config = {"momentum": form.decay, "nesterov": form.weight, "ns_dtype": "float32"}
    if form.kind == "amo":
        amo = AMOConfig.for_run(run.steps, **config, update_norm="exact")
        return AMO(param_groups(model), config=amo, **options)
    schedule = schedule_for(BASE_ELL, form.ns_steps)
    muon = MuonConfig(**config, update_norm="exact", ns_guard_every=0)  # type: ignore[arg-type]
    return Muon(param_groups(model), schedule=schedule, config=muon, **options)  # type: ignore[arg-type]


def validation_loss(run: Run, corpus: data.Corpus) -> float:
    """Train one run; the loss at its end."""
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    settings = Settings(batch=run.batch, rate_decay=run.rate_decay)
    model = Decoder(ARCHITECTURES[run.architecture])
    optimizer = build(model, run)
    stream = data.batches(corpus.train, run.batch, settings.sequence, run.seed)
    for step, batch in enumerate(islice(stream, run.steps), start=1):
        for group in optimizer.param_groups:
            group["lr"] = run.rate * settings.rate_at(step, run.steps)
            if run.form.first_decay is not None and group["algorithm"] == "muon":
                risen = min(step / 100, 1.0) * (run.form.decay - run.form.first_decay)
                group["momentum"] = group["nesterov"] = run.form.first_decay + risen
        train.take_step(model, optimizer, batch, settings)
        optimizer.zero_grad()
    return train.evaluate(model, corpus, Settings())


def report(records: Records) -> Iterator[str]:
    """Tables: each form at each rate, and each form against today's at the best of both."""
    settings = sorted({(r.architecture, r.steps, r.batch, r.rate_decay) for r in records})
    for architecture, steps, batch, rate_decay in settings:
        yield f"\n### {architecture}, {steps} steps, batch of {batch}, {rate_decay}\n"
        today = Run(TODAY, 0.0, architecture, 0, steps, batch, rate_decay)
        runs = {replace(run, rate=0.0, seed=0) for run in records}
        forms = sorted((run.form for run in runs if replace(run, form=TODAY) == today), key=repr)
        named = {name_of(form): replace(today, form=form) for form in forms}
        yield study.table(records, named, today, "form")


def name_of(form: Form) -> str:
    """Name of a form in a table."""
    if form.kind == "adamw":
        return f"AdamW, betas {form.decay:g} and {form.weight:g}"
    text = f"decay {form.decay:g}, weight {form.weight:g}"
    text += f", momentum from {form.first_decay:g}" if form.first_decay is not None else ""
    return text + (
        ", AMO" if form.kind == "amo" else f", {form.ns_steps} steps" * (form.ns_steps != 5)
    )


def main(args: Sequence[str] | None = None) -> int:
    return study.main("momentum", RECORDS, read, jobs, validation_loss, report, args)


if __name__ == "__main__":
    raise SystemExit(main())
