"""From a run in the paper's units to a config file, options and a folder on this machine."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from amo_dist.config import PAPERS_PLANS, AMOConfig, MuonConfig
from amo_dist.schedule.schedule_file import read_toml
from torchtitan_ext import learning_rate
from torchtitan_ext.paper import catalog
from torchtitan_ext.paper.catalog import MODELS, Run, Value
from torchtitan_ext.plugin.run_files import GEOMETRY_FILE

ROOT = Path(__file__).resolve().parents[2]
"""The repository; relative paths of commands are relative to it."""

GPUS_PER_NODE = 8

QUICKSTART = Path("configs/quickstart.toml")

_STEPS = (
    "training.steps",
    "lr_scheduler.warmup_steps",
    "lr_scheduler.total_steps",
    "checkpoint.interval",
)
"""Options that count optimizer steps and scale with the length of the run."""

_WSD: Mapping[str, Value] = {
    "lr_scheduler.decay_ratio": 0.1,
    "lr_scheduler.decay_type": "linear",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where runs go, and what they start from."""

    out: Path = Path("outputs/experiments")
    """Parent of the runs' folders; relative to the repository."""
    base: Path | None = None
    """A config that stands in for those of the paper's models."""
    small: bool = False
    """Scale numbers of steps, rates and horizons to ``base``."""

    @property
    def folder(self) -> Path:
        """``out``, or a folder of its own for the stand-in."""
        return self.out if self.base is None else self.out / self.base.stem


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """A run that can be started."""

    run: Run
    """What it is, in the paper's units."""
    config: Path
    """The TOML file, relative to the repository or absolute."""
    options: Mapping[str, Value]
    """torchtitan's options on top of it."""
    folder: Path
    """``dump_folder``, relative to the repository or absolute."""
    steps: int
    """Length of the run."""
    step_ratio: Fraction
    """Its steps over the paper's, 1 unless scaled."""
    gpus: int | None
    """GPUs of the paper's run; ``None`` for a stand-in."""
    prepare: tuple[tuple[str, ...], ...] = ()
    """Commands that must have run before, each as its arguments after ``amo``."""
    continues: Path | None = None
    """The checkpoint that it starts from."""

    def arguments(self) -> list[str]:
        """Options of torchtitan as arguments, without the config file."""
        options = {"dump_folder": str(self.folder), **self.options}
        # Flags take no value.
        return [
            f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items()
        ]

    def command(self) -> list[str]:
        """What starts the run on this node, from the repository."""
        return ["launch/train_node.sh", str(self.config), *self.arguments()]

    def on_its_gpus(self) -> list[str]:
        """What starts the run on the paper's GPUs, on several nodes through Slurm."""
        if self.gpus is None:
            return self.command()
        if self.gpus <= GPUS_PER_NODE:
            return [f"GPUS={self.gpus}", *self.command()]
        start = ["sbatch", f"--nodes={-(-self.gpus // GPUS_PER_NODE)}", "launch/train.slurm"]
        return [*start, *self.command()[1:]]

    def shown(self, start: Sequence[str]) -> str:
        """All commands, as one would type them; the last is ``start``."""
        lines = [shlex.join(("amo", *command)) for command in self.prepare]
        return "\n".join([*lines, shlex.join(start)])

    def step_of(self, step: int | None) -> int:
        """The step of this run that a step of the paper's stands for; the last for ``None``."""
        if step is None or step == catalog.CONTINUAL_STEPS[-1]:
            return self.steps
        # Checkpoints lie at multiples of the scaled interval, which is rounded once.
        interval = catalog.CONTINUAL_STEPS[0]
        return step // interval * scaled(interval, self.step_ratio)

    def results(self, step: int | None) -> Path:
        """The results file of a checkpoint."""
        return ROOT / self.folder / f"results-step-{self.step_of(step)}.json"

    def checkpoint(self, step: int | None) -> Path:
        """The folder of a checkpoint."""
        return ROOT / self.folder / "checkpoint" / f"step-{self.step_of(step)}"


def scaled(value: int, ratio: Fraction) -> int:
    """A number of steps times a ratio, rounded half up; at least 1 unless it was 0."""
    return 0 if value == 0 else max(1, math.floor(value * ratio + Fraction(1, 2)))


def resolve(run: Run, place: Place) -> Job:
    """Make a job of a run.

    Args:
        run: Of the catalog.
        place: Where it goes, and what stands in for the paper's model.

    Returns:
        The job; nothing is written.

    Raises:
        ValueError: A config is missing or lacks what has to be scaled.
    """
    paper = _paper_config(run)
    reference = read_config(paper)
    if run.config == "continual" and place.base is not None:
        reference = read_config(Path(f"configs/{MODELS[run.model].stem}.toml"))
    config = paper if place.base is None else place.base
    values = reference if place.base is None else read_config(config)
    ratio = Fraction(1)
    if place.small:
        ratio = Fraction(_steps(values, config), _steps(reference, paper))
    options = _options(run, place, reference, values, ratio)
    folder = place.folder / run_folder(run, place)
    static, prepare = _static(run, place)
    continues = _continues(run, place)
    if continues is not None:
        options["checkpoint.initial_load_path"] = str(continues)
    model = MODELS[run.model]
    gpus = model.adamw_gpus if run.config == "adamw" else model.gpus
    return Job(
        run=run,
        config=config,
        options={**options, **static},
        folder=folder,
        steps=int(options.get("training.steps", _steps(values, config))),
        step_ratio=ratio,
        gpus=gpus if place.base is None else None,
        prepare=prepare,
        continues=continues,
    )


def run_folder(run: Run, place: Place) -> str:
    """Name of a run's folder."""
    if place.base is None:
        return run.name
    return place.base.stem + run.name.removeprefix(run.model.lower())


def read_config(path: Path) -> dict[str, Any]:
    """The sections of a config, its path relative to the repository.

    Raises:
        ValueError: It cannot be read or is not TOML.
    """
    return read_toml("config", ROOT / path)


def _paper_config(run: Run) -> Path:
    stem = MODELS[run.model].stem
    name = {"muon": stem, "adamw": f"{stem}_adamw", "continual": f"cpt_{stem}"}[run.config]
    return Path(f"configs/{name}.toml")


def _steps(values: Mapping[str, Any], path: Path) -> int:
    return int(_value(values, path, "training", "steps"))


def _value(values: Mapping[str, Any], path: Path, *names: str) -> Any:
    found: Any = values
    for name in names:
        found = found.get(name) if isinstance(found, Mapping) else None
    if found is None:
        raise ValueError(f"{path}: {'.'.join(names)}: found nothing, expected this field")
    return found


def _options(
    run: Run,
    place: Place,
    reference: Mapping[str, Any],
    values: Mapping[str, Any],
    ratio: Fraction,
) -> dict[str, Value]:
    options = dict(run.options)
    if place.base is not None:
        options |= run.small_options
        options = {**_stand_in(run, values), **options}
    for name in _STEPS:
        if name in options:
            options[name] = scaled(int(options[name]), ratio)
    if place.small:
        _scale_amo(options, reference, values)
    if "optimizer.lr" in options and place.small:
        peak = _peak_rate(reference, _paper_config(run))
        share = float(options["optimizer.lr"]) / peak
        options["optimizer.lr"] = share * _peak_rate(values, _base(place))
    if run.tokens != 1:
        options |= _more_tokens(run.tokens, values, _base(place, run))
    return options


def _base(place: Place, run: Run | None = None) -> Path:
    if place.base is not None:
        return place.base
    assert run is not None
    return _paper_config(run)


def _stand_in(run: Run, values: Mapping[str, Any]) -> dict[str, Value]:
    """What the paper's configs say and a stand-in does not."""
    name = run.options["optimizer.name"]
    if name == "AMO":
        return {f"optimizer.amo.{field}": value for field, value in PAPERS_PLANS.items()}
    if name == "AdamW":
        return dict(_WSD)
    shared = {field.name for field in dataclasses.fields(MuonConfig)}
    amo = values.get("optimizer", {}).get("amo", {})
    return {f"optimizer.muon.{field}": v for field, v in amo.items() if field in shared}


def _scale_amo(
    options: dict[str, Value], reference: Mapping[str, Any], values: Mapping[str, Any]
) -> None:
    """Scale horizons as the stand-in's own are to the paper's; observations keep their number."""
    paper, base = _amo(reference), _amo(values)

    def times(value: Value, field: str) -> int:
        return scaled(int(value), Fraction(base[field], paper[field]))

    prefix = "optimizer.amo."
    if f"{prefix}transition_steps" in options:
        found = options[f"{prefix}transition_steps"]
        options[f"{prefix}transition_steps"] = times(found, "transition_steps")
    if f"{prefix}observe_every" in options:
        every = times(options[f"{prefix}observe_every"], "observe_every")
        options[f"{prefix}observe_every"] = every
        count = base["observe_until"] // base["observe_every"]
        options[f"{prefix}observe_until"] = every * count


def _amo(values: Mapping[str, Any]) -> dict[str, int]:
    defaults = AMOConfig()
    found = values.get("optimizer", {}).get("amo", {})
    names = ("observe_until", "observe_every", "transition_steps")
    return {name: int(found.get(name, getattr(defaults, name))) for name in names}


def _peak_rate(values: Mapping[str, Any], path: Path) -> float:
    optimizer = _value(values, path, "optimizer")
    if optimizer.get("lr_from") != "scaling_law":
        return float(_value(values, path, "optimizer", "lr"))
    law = _value(values, path, "optimizer", "scaling_law")
    return learning_rate.scaling_law_lr(law["params_b"], law["tokens_b"])


def _more_tokens(times: int, values: Mapping[str, Any], path: Path) -> dict[str, Value]:
    """A longer run: its warmup keeps its share, and the rate follows the scaling law."""
    warmup = int(_value(values, path, "lr_scheduler", "warmup_steps"))
    options: dict[str, Value] = {
        "training.steps": times * _steps(values, path),
        "lr_scheduler.warmup_steps": times * warmup,
    }
    if values["optimizer"].get("lr_from") == "scaling_law":
        tokens = _value(values, path, "optimizer", "scaling_law", "tokens_b")
        return {**options, "optimizer.scaling_law.tokens_b": times * tokens}
    factor = times**learning_rate.TOKENS_EXPONENT
    return {**options, "optimizer.lr": float(_peak_rate(values, path) * factor)}


def _static(run: Run, place: Place) -> tuple[dict[str, Value], tuple[tuple[str, ...], ...]]:
    """The option that names a run's schedule file, and the command that makes the file."""
    static = run.static
    if static is None:
        return {}, ()
    pool = "all" if static.family is None else static.family.lower()
    path = place.folder / "schedules" / f"{pool}-{static.rule}-{static.tolerance}.toml"
    # A stand-in has one model, and so one log and one family.
    models = list(MODELS) if place.base is None else [run.model]
    logs = [
        str(place.folder / run_folder(catalog.geometry_run(model), place) / GEOMETRY_FILE)
        for model in models
    ]
    family: tuple[str, ...] = ()
    if static.family is not None:
        named = ("--family", static.family) if place.base is None else ()
        family = ("--pool", "family", *named)
    rule = ("--rule", static.rule, "--tolerance", static.tolerance)
    command = ("paper", "static-schedule", *logs, *rule, *family, "-o", str(path))
    return {"optimizer.muon.schedule_file": str(path)}, (command,)


def _continues(run: Run, place: Place) -> Path | None:
    if run.continues is None:
        return None
    job = resolve(catalog.ALL_RUNS[run.continues], place)
    return job.folder / "checkpoint" / f"step-{job.steps}"
