"""What the sections of an optimizer say about one another."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from torchtitan.config import ConfigManager

from amo_dist import AMOConfig
from tests.distributed import models
from torchtitan_ext.config import checks, settings
from torchtitan_ext.plugin.optimizers import MuonSection, OptimizersContainer
from torchtitan_ext.plugin.trainer import Trainer

CONFIG = f"--job.config_file={Path(__file__).parents[2] / 'configs' / 'quickstart.toml'}"


def parse(name: str, *args: str) -> Any:
    return settings.parse([CONFIG, f"--optimizer.name={name}", *args])


def built(config: Any) -> Any:
    """The configuration of the optimizer that comes of a config."""
    root = models.plain_model(models.shapes())
    return config.optimizer.build(model_parts=[root]).optimizer.config


@pytest.mark.parametrize("name", ["AMO", "Muon", "AdaMuon"])
def test_a_name_alone_keeps_the_numerics_of_the_config(name: str) -> None:
    config = parse(name, "--optimizer.muon.momentum=0.5", "--optimizer.muon.no-nesterov")
    found = built(config)
    assert (found.ns_dtype, found.momentum, found.nesterov) == ("float32", 0.5, False)
    # What is logged and compared at a resume is what is in force.
    assert config.optimizer.amo.momentum == config.optimizer.muon.momentum == 0.5


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("AMO", "", "exact"),
        ("Muon", "", "as_is"),
        ("AMO", "as_is", "as_is"),
        ("Muon", "exact", "exact"),
        ("AMO", "exact", "exact"),
    ],
)
def test_the_size_of_updates_is_the_optimizers_own_where_it_is_left_open(
    name: str, given: str, expected: str
) -> None:
    found = built(parse(name, *([f"--optimizer.muon.update_norm={given}"] if given else [])))
    assert found.update_norm == expected


def test_a_shared_field_that_a_program_sets_for_amo_alone_is_an_error() -> None:
    section = OptimizersContainer.Config(name="AMO", amo=AMOConfig(momentum=0.5))
    with pytest.raises(ValueError, match=r"\[optimizer.amo\] momentum: found 0.5, expected it in"):
        built_of(section)
    section = OptimizersContainer.Config(
        name="AMO", amo=AMOConfig(momentum=0.5), muon=MuonSection(momentum=0.5)
    )
    assert built_of(section).momentum == 0.5


def built_of(section: OptimizersContainer.Config) -> Any:
    return section.build(model_parts=[models.plain_model(models.shapes())]).optimizer.config  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["AMO", "Muon"])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), ("error", "error")),
        (("--optimizer.on_config_change=use_config",), ("use_config", "replan")),
        (("own=keep_checkpoint",), ("keep_checkpoint", "keep_checkpoint")),
        (("own=replan",), ("use_config", "replan")),
        # Each its own: a new learning rate, and the settings of the checkpoint.
        (
            ("--optimizer.on_config_change=use_config", "own=keep_checkpoint"),
            ("use_config", "keep_checkpoint"),
        ),
    ],
)
def test_one_word_about_changes_is_enough(
    name: str, options: tuple[str, ...], expected: tuple[str, str]
) -> None:
    own = "--optimizer.muon.on_config_change="
    config = parse(name, *(option.replace("own=", own) for option in options))
    assert (config.optimizer.on_config_change, built(config).on_config_change) == expected


def test_torchtitans_own_entry_point_and_the_preflight_do_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = ["--optimizer.name=Muon", "--optimizer.muon.momentum=0.5"]
    arguments = ["--module=torchtitan_ext", "--config=quickstart", *options]
    monkeypatch.setattr("sys.argv", ["train", *arguments])
    config = ConfigManager().parse_args()
    found = built(settings.complete(config))
    assert (found.ns_dtype, found.momentum) == ("float32", 0.5)
    config, problems = checks.examine(settings.load([CONFIG, *options]), 2)
    assert problems == []
    assert (config.optimizer.muon.ns_dtype, config.optimizer.muon.momentum) == ("float32", 0.5)


# ------------------------------------------------------------------ defaults that somebody gives


def fields() -> dict[str, Any]:
    """The default of every field that a file can hold, by its name."""
    found: dict[str, Any] = {}

    def walk(section: Any, prefix: str) -> None:
        for field in dataclasses.fields(section):
            value, name = getattr(section, field.name), prefix + field.name
            if dataclasses.is_dataclass(value):
                walk(value, f"{name}.")
            elif isinstance(value, (bool, int, float, str, list)) and field.name[0] != "_":
                found[name] = value

    walk(Trainer.Config(), "")
    found = {name: value for name, value in found.items() if value != []}
    hidden = ("dataloader.positions", "validator.dataloader.positions")
    shared = [f"optimizer.amo.{field.name}" for field in dataclasses.fields(MuonSection)]
    return {name: value for name, value in found.items() if name not in {*hidden, *shared}}


BASES: dict[str, dict[str, Any]] = {
    # Each with every rule by which one field says another.
    "AMO": {"optimizer": {"name": "AMO"}},
    "Muon": {"optimizer": {"name": "Muon", "muon": {"momentum": 0.5, "ns_dtype": "float32"}}},
}


@pytest.mark.parametrize("base", BASES)
def test_every_field_of_every_section_is_read_from_a_file(base: str, tmp_path: Path) -> None:
    values = copy.deepcopy(BASES[base])
    values |= {"model": {"name": "llama3", "flavor": "tiny"}, "training": {"steps": 9999}}
    written = [*_lines(values)]
    given = {line.partition(" = ")[0] for line in written}
    written += [f"{name} = {_toml(v)}" for name, v in fields().items() if name not in given]
    path = tmp_path / "all.toml"
    path.write_text("\n".join(written))
    config = settings.parse([f"--job.config_file={path}"])
    for name, expected in fields().items():
        found: Any = config
        for part in name.split("."):
            found = getattr(found, part)
        if name not in given and name.rpartition(".")[2] not in ("update_norm", "tokens"):
            assert found == expected, name


def _lines(values: dict[str, Any], prefix: str = "") -> Any:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _lines(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name} = {_toml(value)}"


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
