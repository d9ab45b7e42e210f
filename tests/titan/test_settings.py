"""The job config: what is accepted, and how mistakes are told."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from amo_dist.tools.command import Mistakes
from torchtitan_ext import train
from torchtitan_ext.config import settings, values

ROOT = Path(__file__).resolve().parents[2]
AMO = "[optimizer]\nname = 'AMO'\n[optimizer.amo]\nobserve_until = 8\nobserve_every = 4\n"
BYTE = "[tokenizer]\nkind = 'byte'\n"


def parse(tmp_path: Path, toml: str, *args: str) -> Any:
    path = tmp_path / "config.toml"
    path.write_text(toml)
    return settings.parse(["--job.config_file", str(path), *args])


def test_fields_of_the_project_come_from_file_and_command_line(tmp_path: Path) -> None:
    options = ("--optimizer.amo.budget_ratio", "0.9", "--activation-checkpoint.mode=full")
    config = parse(tmp_path, AMO + BYTE, *options, "--dump-folder", "there")
    assert (config.activation_checkpoint.mode, config.dump_folder) == ("full", "there")
    assert config.optimizer.amo.observe_until == 8
    assert config.optimizer.amo.budget_ratio == 0.9
    assert config.optimizer.amo.shrinkage == 0.7  # default of the dataclass
    assert config.tokenizer.kind == "byte"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("job.dump_folder", "dump_folder"),
        ("model.hf_assets_path", "hf_assets_path"),
        ("data.tokenizer", "tokenizer.kind"),
        ("data.text_field", "dataloader.text_field"),
        ("training.dataset_path", "dataloader.dataset_path"),
        ("validation.dataset", "validator.dataloader.dataset"),
        ("validation.freq", "validator.freq"),
        ("profiling.profile_freq", "profiler.profile_freq"),
        ("optimizer.amo.ns_dtype", "optimizer.muon.ns_dtype"),
    ],
)
def test_a_field_by_another_name_is_an_error_that_says_the_right_one(
    tmp_path: Path, name: str, expected: str
) -> None:
    section, _, field = name.rpartition(".")
    told = f"{name}: found a field that does not exist, expected {expected}"
    with pytest.raises(ValueError, match=rf"config\.toml: {re.escape(told)}$"):
        parse(tmp_path, f"[{section}]\n{field} = 'x'\n")


@pytest.mark.parametrize(
    "option", ["--data.text_field", "--data.text_field=x", "--data.text-field"]
)
def test_so_is_an_option_by_another_name(tmp_path: Path, option: str) -> None:
    with pytest.raises(ValueError, match=r"found a field .* expected dataloader\.text_field$"):
        parse(tmp_path, AMO, option, "x")


def test_what_follows_from_other_fields_is_settled_once_for_all(tmp_path: Path) -> None:
    config = parse(tmp_path, AMO + BYTE + "[model]\nname = 'llama3'\nflavor = 'tiny'\n")
    assert (config.model_spec.name, config.model_spec.flavor) == ("llama3", "tiny")
    assert config.loss.global_vocab_size == 320
    assert config.training.disable_cuda_graphs
    again = settings.complete(config)
    assert values.plain(again) == values.plain(config)
    assert again is not config


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        (
            "[optimizer.amo]\nobserv_every = 3\n",
            r"optimizer\.amo\.observ_every: found a field .*; did you mean 'observe_every'\?$",
        ),
        (
            "[optimiser]\nlr = 1\n",
            r"optimiser: found a field that a config does not have; did you mean 'optimizer'\?",
        ),
        ("[optimizer]\nlr = 'fast'\n", r"optimizer\.lr: found 'fast', expected a number$"),
        ("[optimizer]\nlr = true\n", r"optimizer\.lr: found True, expected a number$"),
        ("[training]\nsteps = 1.5\n", r"training\.steps: found 1\.5, expected an integer$"),
        ("[training]\nsteps = '5'\n", r"training\.steps: found '5', expected an integer$"),
        (
            "[checkpoint]\nenable = 'yes'\n",
            r"checkpoint\.enable: found 'yes', expected true or fal",
        ),
        ("[checkpoint]\nenable = 1\n", r"checkpoint\.enable: found 1, expected true or false$"),
        ("[tokenizer]\nkind = 'bytes'\n", r"kind: found 'bytes', expected one of 'hf', 'byte'$"),
        (
            "[compile]\ncomponents = 'model'\n",
            r"components: found 'model', expected a list, of a t",
        ),
        (
            "[compile]\ncomponents = ['model', 3]\n",
            r"components: found \['model', 3\], expected a l",
        ),
        ("dataloader = 3\n", r"dataloader: found 3, expected a section \[dataloader\]$"),
        (
            "[optimizer]\nlr = 1" + 400 * "0" + "\n",
            r"optimizer\.lr: found 10+\.\.\.0+, expected a nu",
        ),
        ("[optimizer.amo]\nobserve_every = 7\n", r"optimizer\.amo\.observe_every: found 7, "),
        ("[optimizer.muon]\nmomentum = 1.0\n", r"optimizer\.muon\.momentum: found 1\.0, "),
        ("[optimizer]\nname = 'amo'\n", "optimizer.name: found 'amo', expected one of 'AMO'"),
        ("[dataloader]\ndataset = 'fineweb'\n", "dataloader.dataset: found 'fineweb', expect"),
        (
            "[validator]\nenable = true\n[validator.dataloader]\ndataset = 'stdlb'\n",
            "validator.dataloader.dataset: found 'stdlb', expected one of 'packed', 'text', ",
        ),
        ("[model]\nname = 'llama2'\n", "model.name: found 'llama2', expected one of "),
        ("[dataloader]\ndataset = 'text'\n", "dataloader.dataset_path: found none, expected a "),
        (
            "[dataloader]\ndataset = 'stdlib'\norder = 'ascend'\n",
            "dataloader.score_field: found none, expected the field",
        ),
        (
            "[training]\nglobal_batch_size = 0\n",
            "training.global_batch_size: found 0, expected an integer >= 1, or -1 for",
        ),
        ("[training]\nseq_len = 0\n", "training.seq_len: found 0, expected an integer >= 1"),
        (
            "[fault_tolerance]\nenable = true\n",
            "fault_tolerance: found a field that a config does n",
        ),
        # A field that follows from others is not set.
        (
            "[dataloader]\npositions = true\n",
            r"dataloader\.positions: found a field that \[dataloa",
        ),
        ("[data\n", "is not TOML"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, toml: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        parse(tmp_path, toml)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*none\.toml"):
        settings.parse([f"--job.config_file={tmp_path / 'none.toml'}"])


def test_a_run_that_ends_before_the_lock_needs_leave(tmp_path: Path) -> None:
    steps = "[training]\nsteps = 307\n"
    with pytest.raises(ValueError, match=r"training.steps: found 307, .* 308 .*allow_unlocked"):
        parse(tmp_path, AMO + BYTE + steps)
    parse(tmp_path, AMO + BYTE + steps, "--training.steps", "308")
    parse(tmp_path, AMO + BYTE + steps, "--optimizer.allow_unlocked")


def test_a_wrong_argument_is_told_and_ends_the_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(tmp_path, AMO + BYTE, "--training.stepz", "3")
    assert "--training.stepz" in capsys.readouterr().err


def test_all_ranks_but_the_first_are_silent_about_the_shared_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        parse(tmp_path, AMO + BYTE, "--training.stepz", "3")
    assert capsys.readouterr() == ("", "")


def test_only_errors_of_the_project_lose_their_traceback() -> None:
    with pytest.raises(ValueError, match=r"found 'nowhere', expected a TOML file") as ours:
        settings.parse(["--job.config_file=nowhere"])
    with pytest.raises(ValueError, match="Expecting value") as others:
        json.loads("nothing")
    assert train.is_users_mistake(ours.value)
    assert not train.is_users_mistake(others.value)


def test_groups_reach_the_optimizer_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "groups.toml"
    # A comma belongs to an expression.
    file.write_text(
        "[optimizer]\nno_decay = ['.*norm.{0,9}', '.*bias']\nlr_multipliers = ['.*wq.*=0.5']\n"
    )
    section = settings.load([f"--job.config_file={file}", "--optimizer.patterns", "a=adamw"])
    assert section.optimizer.no_decay == (".*norm.{0,9}", ".*bias")
    assert section.optimizer.lr_multipliers == (".*wq.*=0.5",)
    assert section.optimizer.patterns == ("a=adamw",)


def test_all_fields_that_do_not_fit_together_are_named_at_once(tmp_path: Path) -> None:
    toml = "[training]\nsteps = 0\n[optimizer]\nname = 'Amo'\n[model]\nflavor = 'huge'\n"
    with pytest.raises(Mistakes) as error:
        parse(tmp_path, toml)
    fields = [problem.partition(":")[0] for problem in error.value.problems]
    assert fields == ["optimizer.name", "model.flavor", "training.steps"]


def test_values_of_a_file_have_their_types(tmp_path: Path) -> None:
    config = parse(
        tmp_path,
        "[compile]\ncomponents = []\n[optimizer]\nlr = 1\n[parallelism]\n"
        "module_fqns_per_model_part = [['a', 'b'], ['c']]\n[override]\nimports = ['m.f', "
        "'m.g={\"a\": 1}', ['m.h', {b = [1, 2]}]]\n",
    )
    assert config.compile.components == []
    assert isinstance(config.optimizer.lr, float)
    assert config.parallelism.module_fqns_per_model_part == [["a", "b"], ["c"]]
    imports = ["m.f", ("m.g", {"a": 1}), ("m.h", {"b": [1, 2]})]
    assert config.override.imports == imports


@pytest.mark.parametrize("name", ["quickstart", "qwen3_1.7b", "cpt_qwen3_0.6b"])
def test_a_complete_config_comes_back_from_json(name: str, tmp_path: Path) -> None:
    config = settings.parse([f"--job.config_file={ROOT / 'configs' / name}.toml"])
    config.override.imports = ["m.f", ("m.g", {"a": 1})]
    config.dump_folder = str(tmp_path / "run")
    arguments = settings.for_ranks(config)
    found = settings.parse(arguments)
    assert values.plain(found) == values.plain(config)
    assert found.model_spec.model == config.model_spec.model
    assert type(found.validator.dataloader) is type(config.validator.dataloader)
    # A rank changes nothing of it.
    assert values.plain(settings.complete(found)) == values.plain(config)
    file = Path(arguments[-1])
    file.write_text(file.read_text().replace('"seq_len"', '"seq_lem"', 1))
    with pytest.raises(ValueError, match=r"training\.seq_lem: found a field .*'seq_len'"):
        settings.parse(arguments)


def test_nodes_that_start_at_once_do_not_take_each_others_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They shared a scratch file: the node that came second ended with `No such file`."""
    folder = tmp_path / "run"
    config = settings.parse(
        [f"--job.config_file={ROOT / 'configs' / 'quickstart.toml'}", f"--dump_folder={folder}"]
    )
    process, flush, others = os.getpid(), os.fsync, [1]

    def other_node_writes_meanwhile(file: int) -> None:
        flush(file)
        if others:
            other = process + others.pop()
            monkeypatch.setattr(os, "getpid", lambda: other)
            settings.for_ranks(config)
            monkeypatch.setattr(os, "getpid", lambda: process)

    monkeypatch.setattr(os, "fsync", other_node_writes_meanwhile)
    arguments = settings.for_ranks(config)
    assert [path.name for path in folder.iterdir()] == ["start.json"]
    assert values.plain(settings.parse(arguments)) == values.plain(config)


def test_resolving_leaves_the_config_that_was_read(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(AMO + BYTE)
    config = settings.load([f"--job.config_file={path}"])
    before = values.plain(config)
    completed = settings.complete(config, 2)
    assert values.plain(config) == before
    assert (config.optimizer.lr, completed.optimizer.lr) == (None, 8e-4)
    with pytest.raises(ValueError, match=r"parallelism: found replicate 1 .* a product of 3 ranks"):
        settings.resolve(str(path), ["--parallelism.data_parallel_shard_degree=2"], 3)


HOSTILE = {
    "a text of 100 kB in an unknown field": (
        "[training]\nstepz = '" + "x" * 100_000 + "'\n",
        "steps",
    ),
    "a name of 100 kB": ("[training]\n" + "x" * 100_000 + " = 1\n", "found a field that"),
    "50,000 dotted parts": (".".join(["a"] * 50_000) + " = 1\n", "found a line with 49999 dots"),
    "parts in nested tables": ("a = " + "{b = " * 20 + "1" + "}" * 20 + "\n", "nested sections"),
    "a file of 30 MB": (
        "x = '" + "x" * 30_000_000 + "'\n",
        "cannot read .*more than 1048576 bytes",
    ),
    "a NUL in extends": ('extends = "a\\u0000b"\n', r"config\.toml: extends: found 'a\\x00b', exp"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_files_end_at_once_in_a_line(tmp_path: Path, kind: str) -> None:
    toml, message = HOSTILE[kind]
    with pytest.raises(ValueError, match=message) as error:
        parse(tmp_path, toml)
    assert len(str(error.value)) < 2000


def test_a_chain_of_800_files_ends_at_the_sixteenth(tmp_path: Path) -> None:
    for number in range(800):
        (tmp_path / f"{number}.toml").write_text(f"extends = '{number + 1}.toml'\n")
    with pytest.raises(
        ValueError, match=r"15\.toml: extends: found '16\.toml', file 17 of a chain"
    ):
        settings.load([f"--job.config_file={tmp_path / '0.toml'}"])
