"""Config file, options and folder on this machine of a run in the paper's units."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.amo_paper import catalog
from benchmarks.amo_paper.catalog import GEOMETRY_FILE, MODELS, Run, Value
from benchmarks.amo_paper.learning_rate import TOKENS_EXPONENT
from torchtitan_ext.config import files

ROOT = Path(__file__).resolve().parents[2]
"""The repository; relative paths of commands are relative to it."""

GPUS_PER_NODE = 8

PAPER = ("python", "-m", "benchmarks.amo_paper")
"""Runs a command of this package, from the repository."""

QUICKSTART = Path("configs/quickstart.toml")

_WSD: Mapping[str, Value] = {
    "lr_scheduler.decay_ratio": 0.1,
    "lr_scheduler.decay_type": "linear",
}


Fields = Mapping[str, Any]
"""What a TOML file and those that it extends say, by dotted name."""


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Folder of runs, and the model that they train.

    Attributes:
        out: Parent of the runs' folders; relative to the repository.
        small: The quickstart's model stands in for the paper's.
    """

    out: Path = Path("outputs/experiments")
    small: bool = False

    @property
    def folder(self) -> Path:
        """``out``, or a folder of its own for the stand-in."""
        return self.out / QUICKSTART.stem if self.small else self.out


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """A run that can be started.

    Attributes:
        run: What it is, in the paper's units.
        config: The TOML file, relative to the repository or absolute.
        options: torchtitan's options on top of it.
        folder: ``dump_folder``, relative to the repository or absolute.
        steps: Length of the run.
        gpus: GPUs of the paper's run; ``None`` for a stand-in.
        prepare: Command that must have run before, as arguments of this package; its output is the
            last.
    """

    run: Run
    config: Path
    options: Mapping[str, Value]
    folder: Path
    steps: int
    gpus: int | None
    prepare: tuple[str, ...] = ()

    def arguments(self) -> list[str]:
        """Options of torchtitan as arguments, without the config file."""
        options = {"dump_folder": str(self.folder), **self.options}
        # Flags take no value.
        return [
            f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items()
        ]

    def on_its_gpus(self) -> list[str]:
        """What starts the run on the paper's GPUs, on several nodes through Slurm."""
        options = [str(self.config), *self.arguments()]
        if self.gpus is None:
            return ["amo", "train", *options]
        if self.gpus <= GPUS_PER_NODE:
            return ["amo", "train", *options, "--ranks", str(self.gpus)]
        nodes = -(-self.gpus // GPUS_PER_NODE)
        return ["sbatch", f"--nodes={nodes}", "launch/train.slurm", *options]

    def shown(self) -> str:
        """All commands, as one would type them."""
        before = f"{shlex.join((*PAPER, *self.prepare))}\n" if self.prepare else ""
        return before + shlex.join(self.on_its_gpus())

    def step_of(self, step: int | None) -> int:
        """The step of a checkpoint; the last for ``None``."""
        return self.steps if step is None else step

    def results(self, step: int | None) -> Path:
        """The results file of a checkpoint."""
        return ROOT / self.folder / f"results-step-{self.step_of(step)}.json"

    def checkpoint(self, step: int | None) -> Path:
        """The folder of a checkpoint."""
        return ROOT / self.folder / "checkpoint" / f"step-{self.step_of(step)}"


def resolve(run: Run, place: Place) -> Job:
    """Make a job of a run.

    Args:
        run: Run of the catalog.
        place: Place of its folder.

    Returns:
        The job; nothing is written.

    Raises:
        ValueError: A config is missing.
    """
    model = MODELS[run.model]
    stems = {
        "muon": model.stem,
        "adamw": f"{model.stem}_adamw_paper",
        "continual": f"cpt_{model.stem}",
    }
    path = QUICKSTART if place.small else Path(f"configs/{stems[run.config]}.toml")
    config = read_config(path)
    options = {**(_stand_in(run) if place.small else {}), **run.options}
    if run.tokens != 1:
        options |= _more_tokens(run.tokens, config)
    static, prepare = _static(run, place)
    if run.continues is not None:
        base = resolve(catalog.ALL_RUNS[run.continues], place)
        options["checkpoint.initial_load_path"] = f"{base.folder}/checkpoint/step-{base.steps}"
    gpus = model.adamw_gpus if run.config == "adamw" else model.gpus
    return Job(
        run=run,
        config=path,
        options={**options, **static},
        folder=place.folder / run_folder(run, place),
        steps=int({**config, **options}["training.steps"]),
        gpus=None if place.small else gpus,
        prepare=prepare,
    )


def run_folder(run: Run, place: Place) -> str:
    """Name of a run's folder."""
    if not place.small:
        return run.name
    return QUICKSTART.stem + run.name.removeprefix(run.model.lower())


def fields(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The fields of sections by dotted name.

    >>> dict(fields({"training": {"steps": 3}, "description": "a run"}))
    {'training.steps': 3, 'description': 'a run'}
    """
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from fields(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def read_config(path: Path) -> Fields:
    """Read a file, with those that it extends.

    Raises:
        ValueError: It cannot be read or is not TOML.
    """
    return dict(fields(files.read(ROOT / path)))


def _stand_in(run: Run) -> dict[str, Value]:
    """What the paper's configs say and a stand-in does not."""
    name = run.options["optimizer.name"]
    if name == "AMO":
        return {"optimizer.amo.planner": "paper", "optimizer.muon.update_norm": "as_is"}
    return dict(_WSD) if name == "AdamW" else {}


def _more_tokens(times: int, config: Fields) -> dict[str, Value]:
    """A longer run: its warmup keeps its share, and the rate follows the scaling law."""
    return {
        "training.steps": times * config["training.steps"],
        "lr_scheduler.warmup_steps": times * config["lr_scheduler.warmup_steps"],
        "optimizer.lr": config["optimizer.lr"] * times**TOKENS_EXPONENT,
    }


def _static(run: Run, place: Place) -> tuple[dict[str, Value], tuple[str, ...]]:
    """The option that names a run's schedule file, and the command that makes the file."""
    static = run.static
    if static is None:
        return {}, ()
    pool = "all" if static.family is None else static.family.lower()
    path = place.folder / "schedules" / f"{pool}-{static.rule}-{static.tolerance}.toml"
    # A stand-in has one model, and so one log and one family.
    models = [run.model] if place.small else list(MODELS)
    logs = [
        str(place.folder / run_folder(catalog.geometry_run(model), place) / GEOMETRY_FILE)
        for model in models
    ]
    family = ("--family", static.family) if static.family and not place.small else ()
    rule = ("--rule", static.rule, "--tolerance", static.tolerance)
    command = ("static-schedule", *logs, *rule, *family, "-o", str(path))
    return {"optimizer.muon.schedule_file": str(path)}, command
