"""What each experiment of the AMO paper consists of: runs, and the rows of its table."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

from amo_dist.config import AMOConfig

GEOMETRY_FILE = "geometry.jsonl"
"""Log of the callback of the geometry pilot, in the folder of its run."""

Value = str | int | float


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """One of the paper's eight models.

    Attributes:
        name: Name in the paper's tables.
        stem: ``configs/<stem>.toml``, and ``configs/<stem>_adamw_paper.toml`` for AdamW.
        family: What its geometry logs say.
        gpus: GPUs of its Muon runs.
        adamw_gpus: GPUs of its AdamW runs.
    """

    name: str
    stem: str
    family: str
    gpus: int
    adamw_gpus: int


MODELS: Mapping[str, Model] = {
    model.name: model
    for model in (
        Model("Qwen3-70M", "qwen3_70m", "Qwen3", 6, 8),
        Model("Qwen3-300M", "qwen3_300m", "Qwen3", 16, 16),
        Model("Qwen3-0.6B", "qwen3_0.6b", "Qwen3", 16, 16),
        Model("Qwen3-1.7B", "qwen3_1.7b", "Qwen3", 32, 32),
        Model("Llama-3.1-75M", "llama3.1_75m", "Llama-3.1", 6, 8),
        Model("Llama-3.1-480M", "llama3.1_480m", "Llama-3.1", 16, 16),
        Model("Llama-3.1-760M", "llama3.1_760m", "Llama-3.1", 16, 16),
        Model("Llama-3.1-1.4B", "llama3.1_1.4b", "Llama-3.1", 32, 32),
    )
}
"""Models by name."""

OPTIMIZERS = (
    *("AdamW", "Muon-KJ", "Muon-You", "Muon-PE", "Muon-CANS", "Muon-Turbo"),
    *("AdaMuon", "ROOT", "AMO"),
)
"""Rows of the paper's tables in their order: values of ``optimizer.name``, where KJ is `Muon`."""


@dataclasses.dataclass(frozen=True, slots=True)
class StaticSchedule:
    """A schedule file to be made from the geometry pilot before a run.

    Attributes:
        rule: Value of ``--rule`` of ``python -m benchmarks.amo_paper static-schedule``.
        tolerance: Value of its ``--tolerance``.
        family: Pool of this family, or of all models.
    """

    rule: str
    tolerance: str
    family: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One training run, in the paper's units; :mod:`.resolve` makes a command of it.

    Attributes:
        name: Its folder. Runs with one name are one run, whichever experiments they belong to.
        model: Key of ``MODELS``.
        config: ``muon``, ``adamw`` or ``continual``: which config of the model it starts from.
        options: torchtitan's options beyond the config.
        tokens: Multiple of the config's steps and tokens; warmup and learning rate follow.
        static: The schedule file it needs.
        continues: The run whose last checkpoint it starts from.
    """

    name: str
    model: str
    config: str
    options: Mapping[str, Value]
    tokens: int = 1
    static: StaticSchedule | None = None
    continues: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A row of the table.

    Attributes:
        block: The block of rows it belongs to.
        label: First cell.
        run: Run that gives its numbers.
        step: Step of the evaluated checkpoint, in the paper's units; the last by default.
    """

    block: str
    label: str
    run: Run
    step: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Experiment:
    """Runs and the table they fill.

    Attributes:
        name: How the command line calls it.
        title: One line.
        rows: Rows in the order of the paper's table.
    """

    name: str
    title: str
    rows: Sequence[Row]

    def runs(self) -> list[Run]:
        """The distinct runs, in the order of their first rows."""
        return list({row.run.name: row.run for row in self.rows}.values())

    def counts_steps(self) -> bool:
        """Whether rows or options name steps of the paper's runs; other models have others."""
        options = {name for run in self.runs() for name in run.options}
        names_steps = any(re.search("steps|observe", name) for name in options)
        return names_steps or any(row.step for row in self.rows)

    def for_model(self, model: str | None) -> Experiment:
        """Only the rows of one model.

        Raises:
            ValueError: No row is of this model; the message lists those there are.
        """
        if model is None:
            return self
        rows = [row for row in self.rows if row.run.model == model]
        if not rows:
            known = ", ".join(dict.fromkeys(row.run.model for row in self.rows))
            raise ValueError(f"--model: found {model!r}, {self.name} has {known}")
        return dataclasses.replace(self, rows=rows)


def run_of(
    model: str,
    optimizer: str,
    suffix: str = "",
    options: Mapping[str, Value] | None = None,
    *,
    tokens: int = 1,
) -> Run:
    """A run from scratch of a model with an optimizer, and what differs from its config."""
    name = f"{model}-{optimizer}".lower() + (f"-{suffix}" if suffix else "")
    config = "adamw" if optimizer == "AdamW" else "muon"
    options = {"optimizer.name": optimizer.removesuffix("-KJ"), **(options or {})}
    return Run(name, model, config, options, tokens=tokens)


def _main() -> Experiment:
    models = ("Llama-3.1-760M", "Llama-3.1-1.4B", "Qwen3-0.6B", "Qwen3-1.7B")
    rows = [Row(m, name, run_of(m, name)) for m in models for name in OPTIMIZERS]
    return Experiment("main", "nine optimizers on four models", rows)


def _prolonged() -> Experiment:
    def row(model: str, times: int, name: str) -> Row:
        run = run_of(model, name, f"{times}x", tokens=times)
        return Row(f"{model} {times}x", name, run)

    names = ("Muon-KJ", "Muon-PE", "AMO")
    rows = [row("Qwen3-0.6B", times, name) for times in (2, 5, 10) for name in names]
    rows += [row("Llama-3.1-1.4B", 2, name) for name in ("Muon-KJ", "AMO")]
    return Experiment("prolonged", "2, 5 and 10 times the tokens", rows)


CONTINUAL_STEPS = (2000, 4000, 6000, 8000, 8580)
"""Steps at which continual pre-training is evaluated."""


def _continual() -> Experiment:
    model, base = "Qwen3-0.6B", run_of("Qwen3-0.6B", "AMO", "5x", tokens=5)
    runs = {
        name: dataclasses.replace(
            run_of(model, name, "continual"),
            config="continual",
            continues=base.name,
        )
        for name in ("Muon-KJ", "Muon-PE", "AMO")
    }
    rows = [
        Row(f"Step={step}", name, run, step)
        for step in CONTINUAL_STEPS
        for name, run in runs.items()
    ]
    title = "36 billion tokens of SlimPajama on top of 60 billion"
    return Experiment("continual", title, rows)


def _ablation(
    name: str, title: str, block: str, cells: Mapping[str, Mapping[str, Value]]
) -> Experiment:
    """Cells of one hyperparameter of AMO; the empty one is the default."""
    rows = []
    for label, options in cells.items():
        suffix = f"{name}-{label.strip('()').replace(', ', '-')}" if options else ""
        rows.append(Row(block, label, run_of("Qwen3-0.6B", "AMO", suffix, options)))
    return Experiment(f"ablation-{name}", title, rows)


# Hyperparameters that are swept alone: name, title, block of the table, values.
_SWEEPS: Sequence[tuple[str, str, str, Sequence[Value]]] = (
    ("sample-size", "matrices drawn for an observation", "Observation sample size", (4, 8, 16)),
    ("shrinkage", "how far the plan trusts the observations", "Shrinkage", (0, 0.5, 0.7, 1)),
    ("transition", "steps from uniform to planned", "Transition duration", (1, 100, 300, 600)),
)


def _ablations() -> Iterator[Experiment]:
    def observe(until: int, every: int) -> dict[str, Value]:
        return {"optimizer.amo.observe_until": until, "optimizer.amo.observe_every": every}

    yield _ablation(
        "observation",
        "when AMO observes and plans",
        "Observation horizon and interval",
        {"(800, 100)": observe(800, 100), "(1200, 150)": {}, "(1600, 200)": observe(1600, 200)},
    )
    for name, title, block, values in _SWEEPS:
        field = {"transition": "transition_steps"}.get(name, name.replace("-", "_"))
        default = getattr(AMOConfig(), field)
        options = [
            {} if value == default else {f"optimizer.amo.{field}": value} for value in values
        ]
        yield _ablation(name, title, block, dict(zip(map(str, values), options, strict=True)))


def _budget_control() -> Experiment:
    def run(model: str, ratio: float) -> Run:
        if ratio == 1.0:
            return run_of(model, "AMO")
        return run_of(model, "AMO", f"budget-{ratio}", {"optimizer.amo.budget_ratio": ratio})

    rows = [
        Row(model, str(ratio), run(model, ratio))
        for model in ("Qwen3-0.6B", "Llama-3.1-760M")
        for ratio in (0.8, 0.9, 1.0, 1.1, 1.2)
    ]
    return Experiment("budget-control", "AMO with 80 to 120 % of the Newton-Schulz steps", rows)


def _static() -> Experiment:
    rows = []
    for model in ("Llama-3.1-1.4B", "Qwen3-1.7B"):
        family = MODELS[model].family
        rows += [Row(model, name, run_of(model, name)) for name in ("Muon-KJ", "Muon-PE")]
        for rule, tolerance, pool in itertools.product(
            ("typical", "conservative", "floor"), ("1e-2", "5e-2"), (None, family)
        ):
            suffix = f"static-{rule}-{tolerance}" + ("-family" if pool else "")
            run = dataclasses.replace(
                run_of(model, "Muon-KJ", suffix), static=StaticSchedule(rule, tolerance, pool)
            )
            short = {"typical": "Typical", "conservative": "Cons", "floor": "Floor"}[rule]
            rows.append(Row(model, f"{short} {tolerance}" + (f" {family[0]}" if pool else ""), run))
    return Experiment("static-coefficients", "fixed schedules from measured geometry", rows)


def _ns_steps() -> Experiment:
    rows = []
    for model in ("Qwen3-300M", "Qwen3-0.6B"):
        rows.append(Row(model, "Muon-KJ", run_of(model, "Muon-KJ")))
        for name in ("A1", "A2", "A3", "A4", "A5"):
            options = {"optimizer.muon.schedule": name.lower()}
            rows.append(Row(model, name, run_of(model, "Muon-KJ", name.lower(), options)))
    return Experiment("ns-steps", "hand-made allocations of Newton-Schulz steps", rows)


_WARMUP = "lr_scheduler.warmup_steps"
_DECAY = "lr_scheduler.decay_ratio"


def _schedulers(lr: float, warmup: int, **cosine: Value) -> Mapping[str, Mapping[str, Value]]:
    """Learning rate schedules by name; ``cosine`` is what differs there."""
    own = {f"lr_scheduler.{name}": value for name, value in cosine.items()}
    return {
        "Const": {"optimizer.lr": lr, _WARMUP: 0, _DECAY: 0.0},
        "WS": {_WARMUP: warmup, _DECAY: 0.0},
        "WSD": {_WARMUP: warmup, _DECAY: 0.1, "lr_scheduler.decay_type": "linear"},
        "Cosine": {_WARMUP: warmup, _DECAY: "None", "lr_scheduler.decay_type": "cosine", **own},
    }


SCHEDULERS: Mapping[str, Mapping[str, Mapping[str, Value]]] = {
    "Qwen3-0.6B": _schedulers(1.8e-3, 143),
    # The paper's grid ends at step 3622 of a decay over 3866.
    "Llama-3.1-760M": _schedulers(3.0e-4, 181, warmup_steps=193, total_steps=3866),
}
"""Learning rate schedules of the data curriculum by model and name; the floor is the config's."""


POOLS = {"Llama-3.1-760M": "data/pool_llama3", "Qwen3-0.6B": "data/pool_qwen3"}
"""Folder with the tokens of the one pool by model; ``--dataloader.dataset_path`` names another."""


def _curriculum() -> Experiment:
    """All cells start from the AdamW config: a model has one batch size, and so one pool."""
    rows = []
    for model in ("Llama-3.1-760M", "Qwen3-0.6B"):
        for optimizer, scheduler, order in itertools.product(
            ("Muon", "AdamW"), SCHEDULERS[model], ("Ascend", "Descend", "Uniform")
        ):
            label = f"{optimizer} {scheduler} {order}"
            options = {
                "optimizer.name": optimizer,
                **SCHEDULERS[model][scheduler],
                "dataloader.dataset": "packed",
                "dataloader.dataset_path": POOLS[model],
                "dataloader.order": order.lower(),
            }
            name = f"{model} curriculum {label}".lower().replace(" ", "-")
            rows.append(Row(model, label, Run(name, model, "adamw", options)))
    return Experiment("curriculum", "orders of data, times learning rate schedules", rows)


def geometry_run(model: str) -> Run:
    """The run of the geometry pilot on a model: Muon-KJ, its matrices measured on the way."""
    is_small = model in ("Qwen3-70M", "Llama-3.1-75M")
    callback = "GeometryOfSmallModels" if is_small else "Geometry"
    options = {"metrics.callbacks": f"benchmarks.amo_paper.geometry.{callback}"}
    return run_of(model, "Muon-KJ", "geometry", options)


def _geometry() -> Experiment:
    rows = [Row("geometry", model, geometry_run(model)) for model in MODELS]
    return Experiment("geometry", "geometry of all matrices while Muon trains", rows)


def _cost() -> Experiment:
    names = {"AdamW": "AdamW", "Muon": "Muon-KJ", "AdaMuon": "AdaMuon", "AMO": "AMO"}
    rows = [Row("Qwen3-1.7B", label, run_of("Qwen3-1.7B", name)) for label, name in names.items()]
    return Experiment("cost", "time and memory of the optimizers", rows)


EXPERIMENTS: Mapping[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        _main(),
        _prolonged(),
        _continual(),
        *_ablations(),
        _budget_control(),
        _static(),
        _ns_steps(),
        _curriculum(),
        _geometry(),
        _cost(),
    )
}
"""Every experiment by name."""

ALL_RUNS: Mapping[str, Run] = {
    run.name: run for experiment in EXPERIMENTS.values() for run in experiment.runs()
}
"""Every run by name."""
