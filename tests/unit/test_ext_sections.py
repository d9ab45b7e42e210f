"""What an optimizer takes from the section of another, and from torchtitan's fields."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import models

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own modules warn while torchtitan imports them
    from torchtitan.config import ConfigManager

    from torchtitan_ext.plugin import sections, settings, toml_config
    from torchtitan_ext.plugin.trainer import Trainer

from torchtitan_ext.tools import preflight_checks

CONFIG = f"--job.config_file={Path(__file__).parents[2] / 'configs' / 'quickstart.toml'}"


def parse(name: str, *args: str) -> Any:
    return settings.parse([CONFIG, f"--optimizer.name={name}", *args])


def built(config: Any) -> Any:
    """The configuration of the optimizer that comes of a config."""
    root = models.plain_model(models.shapes())
    return config.optimizer.build(model_parts=[root]).optimizer.config


@pytest.mark.parametrize("name", ["Muon", "AdaMuon"])
def test_a_name_alone_keeps_the_numerics_of_the_config(name: str) -> None:
    options = ("--optimizer.amo.momentum=0.5", "--optimizer.amo.no-nesterov")
    found = built(parse(name, *options))
    assert (found.ns_dtype, found.momentum, found.nesterov) == ("float32", 0.5, False)


def test_what_the_own_section_names_holds_though_it_be_the_default() -> None:
    own = ("--optimizer.muon.ns_dtype=bfloat16", "--optimizer.muon.nesterov")
    config = parse("Muon", *own, "--optimizer.amo.no-nesterov")
    assert (config.optimizer.muon.ns_dtype, config.optimizer.muon.nesterov) == ("bfloat16", True)
    found = built(config)
    assert (found.ns_dtype, found.nesterov) == ("bfloat16", True)


def test_torchtitans_own_entry_point_and_the_preflight_do_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = ["--optimizer.name=Muon", "--optimizer.amo.momentum=0.5"]
    arguments = ["--module=torchtitan_ext", "--config=quickstart", *options]
    monkeypatch.setattr("sys.argv", ["train", *arguments])
    config = ConfigManager().parse_args()
    settings.settle(config)
    found = built(config)
    assert (found.ns_dtype, found.momentum) == ("float32", 0.5)
    config, problems = preflight_checks.load([CONFIG, *options])
    assert problems == []
    assert preflight_checks.check(config, 2) == []
    assert (config.optimizer.muon.ns_dtype, config.optimizer.muon.momentum) == ("float32", 0.5)


def test_fields_are_found_in_either_spelling() -> None:
    arguments = ["--optimizer.amo.ns-dtype", "float32", "--optimizer.muon.no-nesterov", "--x=1"]
    values = {"optimizer": {"lr": 1.0, "amo": {"nonfinite": "error"}}, "data": {"seed": 1}}
    found = toml_config.given_fields(values, [*arguments, "--optimizer.amo.nonfinite=error"])
    assert found == {
        *("optimizer.amo.ns_dtype", "optimizer.muon.nesterov", "x", "optimizer.lr"),
        *("optimizer.amo.nonfinite", "dataloader.seed"),
    }
    assert sections.given_here(found) == {"amo.ns_dtype", "muon.nesterov", "lr", "amo.nonfinite"}


# ------------------------------------------------------------------ defaults that somebody gives


def defaults() -> dict[str, Any]:
    """The default of every field that a file can hold, by its name in the config."""
    found: dict[str, Any] = {}

    def walk(section: Any, prefix: str) -> None:
        for field in dataclasses.fields(section):
            value, name = getattr(section, field.name), prefix + field.name
            if dataclasses.is_dataclass(value):
                walk(value, f"{name}.")
            elif isinstance(value, (bool, int, float, str, list)) and field.name[0] != "_":
                found[name] = value

    walk(Trainer.Config(), "")
    return found


def settled(values: dict[str, Any], name: str, value: Any) -> Any:
    """The config of a file with one more field."""
    values = copy.deepcopy(values)
    *path, last = name.split(".")
    branch = values
    for one in path:
        branch = branch.setdefault(one, {})
    branch[last] = value
    config, problems = toml_config.read(values)
    if problems:
        raise ValueError(problems[0])
    settings.settle(config)
    settings.validate(config)
    return config


BASES: dict[str, dict[str, Any]] = {
    # Each with every rule by which one field says another: the law, the section of another name.
    "AMO": {"optimizer": {"name": "AMO"}},
    "law": {"optimizer": {"lr_from": "scaling_law", "scaling_law": {"params_b": 1, "tokens_b": 1}}},
    "Muon": {
        "optimizer": {
            "name": "Muon",
            "amo": {"momentum": 0.5, "nesterov": False, "ns_dtype": "float32"},
        }
    },
    "Muon-PE": {"optimizer": {"name": "Muon-PE"}},
}


@pytest.mark.parametrize("base", BASES)
def test_no_default_that_a_file_gives_is_lost(base: str) -> None:
    """It holds, or is an error that names it: another value would be lost as silently."""
    values = {"model": {"name": "llama3", "flavor": "tiny"}, "training": {"steps": 9999}}
    values |= BASES[base]
    refused = set()
    for name, value in defaults().items():
        section, _, last = name.rpartition(".")
        in_base: Any = values
        for one in name.split("."):
            in_base = in_base.get(one, {})
        if in_base != {}:  # given another value by the base
            continue
        try:
            config = settled(values, name, value)
        except ValueError as error:
            refused.add(name if last in str(error) else f"{name}: {error}")
            continue
        assert name in config.given
        for one in section.split(".") if section else ():
            config = getattr(config, one)
        assert getattr(config, last) == value, name
    muon = {name for name in defaults() if name.startswith("optimizer.muon.")}
    assert (
        refused
        == {
            "AMO": muon - {"optimizer.muon.per_head"},  # of the groups, whatever takes them
            "law": {"optimizer.lr"},
            "Muon": set(),
            "Muon-PE": {"optimizer.muon.schedule"},
        }[base]
    )


def test_no_default_that_an_argument_gives_is_lost() -> None:
    law = Path(__file__).parents[2] / "configs" / "qwen3_70m.toml"
    with pytest.raises(ValueError, match=r"optimizer\.lr: found 0\.0008, expected none"):
        settings.parse([f"--job.config_file={law}", "--optimizer.lr", "8e-4"])
    names = set(defaults())
    arguments = [f"--{name}={value}" for name, value in defaults().items()]
    assert names <= toml_config.given_fields({}, arguments)


def test_a_field_under_both_of_its_names_is_an_error() -> None:
    values = {"data": {"seed": 1}, "dataloader": {"seed": 2}}
    _, problems = toml_config.read(values)
    assert problems == [
        "dataloader.seed: found this field under another name, too; expected it once"
    ]
