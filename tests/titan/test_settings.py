"""Configs: what TOML files and options make of them, and which mistakes are named."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from torchtitan.config import ConfigManager

from benchmarks.amo_paper.resolve import fields
from tests.distributed import models
from torchtitan_ext import config_registry, train
from torchtitan_ext.config import checks, files, settings, values
from torchtitan_ext.plugin.metrics import MetricsProcessor
from torchtitan_ext.plugin.optimizers import SHARED, MuonSection, OptimizersContainer
from torchtitan_ext.plugin.trainer import Trainer
from torchtitan_ext.runs import files as atomic

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
AMO = "[optimizer]\nname = 'AMO'\n[optimizer.amo]\nobserve_until = 8\nobserve_every = 4\n"
BYTE = "[tokenizer]\nkind = 'byte'\n"


def parse(tmp_path: Path, toml: str, *args: str) -> Any:
    path = tmp_path / "config.toml"
    path.write_text(toml)
    return settings.parse(["--job.config_file", str(path), *args])


def small(*args: str) -> Any:
    return settings.parse([f"--job.config_file={CONFIGS / 'quickstart.toml'}", *args])


def built(config: OptimizersContainer.Config) -> Any:
    """Settings of the optimizer that a section makes."""
    return config.build(model_parts=[models.plain_model(models.shapes())]).optimizer.config


# ------------------------------------------------------------------ files and options


def test_a_file_says_only_what_differs(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    for name, text in {
        "base/low.toml": "a = 1\n[s]\nx = 1\ny = [1, 2]\n[s.t]\nz = 1\n",
        "base/middle.toml": "extends = 'low.toml'\nb = 2\n[s]\nx = 2\n",
        "top.toml": "extends = 'base/middle.toml'\n[s]\ny = [3]\n[s.t]\nw = 3\n",
    }.items():
        (tmp_path / name).write_text(text)
    expected = {"a": 1, "b": 2, "s": {"x": 2, "y": [3], "t": {"z": 1, "w": 3}}}
    assert files.read(tmp_path / "top.toml") == expected


def test_options_are_laid_over_a_file(tmp_path: Path) -> None:
    options = ("--optimizer.amo.budget_ratio", "0.9", "--activation-checkpoint.mode=full")
    groups = "no_decay = ['.*norm.{0,9}']\n[optimizer.lr_multipliers]\n'.*wq.*' = 2\n"
    amo = AMO.replace("'AMO'\n", f"'AMO'\n{groups}")
    config = parse(tmp_path, amo + BYTE, *options, "--dump-folder", "there", "--optimizer.lr=1")
    assert (config.activation_checkpoint.mode, config.dump_folder) == ("full", "there")
    assert (config.optimizer.amo.observe_until, config.optimizer.amo.budget_ratio) == (8, 0.9)
    assert config.optimizer.no_decay == (".*norm.{0,9}",)
    assert config.optimizer.lr_multipliers == {".*wq.*": 2.0}
    assert parse(tmp_path, AMO + BYTE, "--optimizer.no_decay", "True").optimizer.no_decay is True


def test_every_field_of_every_section_is_read_from_a_file(tmp_path: Path) -> None:
    defaults = dict(fields(values.plain(Trainer.Config())))
    follow = {*(f"optimizer.amo.{name}" for name in SHARED), "optimizer.muon.update_norm"}
    written = {
        name: value
        for name, value in defaults.items()
        if isinstance(value, (bool, int, float, str)) and name not in follow
    } | {"model.name": "llama3", "model.flavor": "tiny", "training.steps": 9999}
    text = "".join(f"{name} = {json.dumps(value)}\n" for name, value in written.items())
    read = dict(fields(values.plain(parse(tmp_path, text))))
    follow = {name for name in written if name.endswith((".tokens", ".global_vocab_size"))}
    assert {name: read[name] for name in written.keys() - follow} == {
        name: value for name, value in written.items() if name not in follow
    }


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_wrong_option_is_told_by_the_first_rank(
    rank: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "amo")
    with pytest.raises(SystemExit):
        small("--training.stepz", "3")
    assert ("--training.stepz" in capsys.readouterr().err) == (rank == "0")


def test_only_errors_of_the_project_lose_their_traceback() -> None:
    with pytest.raises(ValueError, match=r"job\.config_file: cannot read nowhere") as ours:
        settings.parse(["--job.config_file=nowhere"])
    with pytest.raises(ValueError, match="Expecting value") as others:
        json.loads("nothing")
    assert train.is_users_mistake(ours.value)
    assert not train.is_users_mistake(others.value)


# ------------------------------------------------------------------ what follows from fields


def test_completing_twice_changes_nothing_and_never_the_config_itself() -> None:
    config = settings.load([f"--job.config_file={CONFIGS / 'debug_llama3.toml'}"])[0]
    before = values.plain(config)
    completed = checks.complete(config, 2)
    assert values.plain(config) == before
    assert (completed.model_spec.name, completed.loss.global_vocab_size) == ("llama3", 320)
    assert values.plain(checks.complete(completed)) == values.plain(completed)


@pytest.mark.parametrize("name", ["AMO", "Muon", "AdaMuon"])
def test_a_name_alone_keeps_the_numerics_of_the_config(name: str) -> None:
    options = ("--optimizer.muon.momentum=0.5", "--optimizer.muon.nesterov=False")
    section = small(f"--optimizer.name={name}", *options).optimizer
    assert (built(section).momentum, built(section).nesterov) == (0.5, False)
    # What is logged and compared at a resume is what is in force.
    assert section.amo.momentum == section.muon.momentum == 0.5


@pytest.mark.parametrize(
    ("name", "norm", "expected"),
    [("AMO", "", "exact"), ("Muon", "", "as_is"), ("AMO", "as_is", "as_is")],
)
def test_the_size_of_updates_is_the_optimizers_own(name: str, norm: str, expected: str) -> None:
    section = OptimizersContainer.Config(name=name, muon=MuonSection(update_norm=norm))
    assert built(section).update_norm == expected


# ------------------------------------------------------------------ ranks, torchtitan's own entry


@pytest.mark.parametrize("name", ["quickstart", "qwen3_1.7b", "cpt_qwen3_0.6b"])
def test_a_complete_config_comes_back_from_json(name: str, tmp_path: Path) -> None:
    config = settings.parse([f"--job.config_file={CONFIGS / name}.toml"])
    config.override.imports = ["m.f", ("m.g", {"a": 1})]
    config.dump_folder = str(tmp_path / "run")
    copy = settings.parse(settings.for_ranks(config))
    assert values.plain(copy) == values.plain(config)
    assert copy.model_spec is not None
    assert config.model_spec is not None
    assert copy.model_spec.model == config.model_spec.model
    assert type(copy.validator.dataloader) is type(config.validator.dataloader)


def test_nodes_do_not_share_a_start_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They shared a scratch file: the node that came second ended with `No such file`."""
    config, suffixes = small(f"--dump_folder={tmp_path}"), []
    monkeypatch.setattr(atomic, "replace", lambda *arguments: suffixes.append(arguments[2]))
    for host, process in (("a", 1), ("a", 2), ("b", 1)):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        monkeypatch.setattr("os.getpid", lambda process=process: process)
        settings.for_ranks(config)
    assert len({*suffixes}) == 3


def titan_parse(name: str | Path, *options: str) -> Any:
    arguments = ["--module", "torchtitan_ext", "--config", str(name), *options]
    return ConfigManager().parse_args(arguments)


def test_torchtitan_finds_names_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = CONFIGS / "debug_llama3.toml"
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mine.toml").write_text(f"extends = '{file}'\n")
    monkeypatch.chdir(tmp_path)
    for name in ("debug_llama3", file, "mine", "configs/mine.toml"):
        config = titan_parse(name, "--training.steps", "50", "--optimizer.muon.momentum=0.5")
        assert (config.description, config.training.steps) == ("debug llama3", 50)
        assert built(checks.complete(config).optimizer).momentum == 0.5


def test_torchtitan_lists_the_configs_where_it_finds_none() -> None:
    assert not hasattr(config_registry, "qwen3_17b")
    assert not hasattr(config_registry, "llama3.no_such")
    with pytest.raises(ValueError, match=r"'qwen3_17b' not found .*'qwen3_1\.7b'"):
        titan_parse("qwen3_17b")


@pytest.mark.parametrize(
    ("base", "options"),
    [(Trainer, {}), (OptimizersContainer, {"model_parts": []}), (MetricsProcessor, {})],
)
def test_a_subclass_of_the_users_is_built_as_itself(base: Any, options: dict[str, Any]) -> None:
    class Own(base):  # type: ignore[misc]
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(base.Config):  # type: ignore[misc]
            """Its section."""

        def __init__(self, config: Any, **_: Any) -> None:
            assert getattr(config, "model_spec", config) is not None  # completed before
            raise InterruptedError

    with pytest.raises(InterruptedError):
        Own.Config().build(**options)
