"""What an optimizer takes from the section of another, and from torchtitan's fields."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import models

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own modules warn while torchtitan imports them
    from torchtitan.config import ConfigManager

    from torchtitan_ext.plugin import sections, settings

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


def test_amo_itself_reads_its_own_section_alone() -> None:
    config = parse("AMO", "--optimizer.amo.momentum=0.5")
    assert config.optimizer.muon == type(config.optimizer.muon)()
    assert built(config).momentum == 0.5


@pytest.mark.parametrize("name", ["AMO", "Muon"])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), "foreach"),  # as the file says
        (("--optimizer.implementation=fused",), "fused"),
        (("--optimizer.implementation=for-loop",), "for-loop"),
        # The field of the project is the more particular one.
        (("--optimizer.implementation=for-loop", "own=fused"), "fused"),
        (("--optimizer.implementation=fused", "own=foreach"), "foreach"),
    ],
)
def test_torchtitans_implementation_is_that_of_adamw(
    name: str, options: tuple[str, ...], expected: str
) -> None:
    own = f"--optimizer.{name.lower()}.adamw_implementation="
    config = parse(name, *(option.replace("own=", own) for option in options))
    assert config.optimizer.implementation == expected  # so that a logged config tells it
    assert built(config).adamw_implementation == expected


def test_a_default_implementation_that_nobody_names_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[optimizer]\nname = 'Muon'\n[data]\ntokenizer = 'byte'\n")
    config = settings.parse([f"--job.config_file={file}"])
    assert config.optimizer.implementation == "fused"
    assert built(config).adamw_implementation == "auto"


def test_torchtitans_own_entry_point_and_the_preflight_do_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = ["--optimizer.name=Muon", "--optimizer.implementation=for-loop"]
    arguments = ["--module=torchtitan_ext", "--config=quickstart", *options]
    monkeypatch.setattr("sys.argv", ["train", *arguments])
    config = ConfigManager().parse_args()
    settings.settle(config)
    found = built(config)
    assert (found.ns_dtype, found.adamw_implementation) == ("float32", "for-loop")
    config, problems = preflight_checks.load([CONFIG, *options])
    assert problems == []
    assert preflight_checks.check(config, 2) == []
    assert config.optimizer.muon.ns_dtype == "float32"


def test_fields_are_found_in_either_spelling() -> None:
    arguments = ["--optimizer.amo.ns-dtype", "float32", "--optimizer.muon.no-cuda-graphs", "--x=1"]
    values = {"optimizer": {"lr": 1.0, "amo": {"nonfinite": "error"}}, "model": {"name": "x"}}
    found = sections.given_fields([*arguments, "--optimizer.amo.nonfinite=error"], values)
    assert found == {"amo.ns_dtype", "muon.cuda_graphs", "lr", "amo.nonfinite"}
