"""The job config: what is accepted, and how mistakes are told."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from torchtitan_ext import train
from torchtitan_ext.config import settings

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
    told = f"{name}: found a field that there is not, expected {expected}"
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
    settled = config.to_dict()
    settings.settle(config)
    assert config.to_dict() == settled


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        (
            "[optimizer.amo]\nobserv_every = 3\n",
            r"optimizer.amo.observ_every=3; did you mean 'optimizer.amo.observe_every'\?",
        ),
        ("[optimiser]\nlr = 1\n", "Unrecognized options: optimiser.lr=1"),
        ("[optimizer]\nlr = 'fast'\n", r"Error parsing optimizer.lr: .*'fast'"),
        ("[optimizer]\nlr = true\n", r"Error parsing optimizer.lr: .*'True'"),
        # A way that means no adjustment at all would train at another rate than was asked for.
        ("[optimizer]\nlr_from = 'law'\n", "'law' for argument 'optimizer.lr_from'. Expected one"),
        ("[training]\nsteps = 1.5\n", "training.steps: invalid literal for int.*'1.5'"),
        ("[checkpoint]\nenable = 'yes'\n", "'yes' for argument 'checkpoint.enable'. Expected one"),
        ("[tokenizer]\nkind = 'bytes'\n", r"'bytes' for .*Expected one of \('hf', 'byte', 'tik"),
        ("dataloader = 3\n", "dataloader=3"),
        ("[optimizer.amo]\nobserve_every = 7\n", r"optimizer.amo: observe_every: found 7, "),
        ("[optimizer.muon]\nmomentum = 1.0\n", r"optimizer.muon: momentum: found 1.0, "),
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
        ("[fault_tolerance]\nenable = true\n", "fault_tolerance.enable=True"),
        # What follows from other fields is nobody's to say.
        ("[dataloader]\npositions = true\n", "dataloader.positions=True"),
        (
            "[compile]\ncomponents = []\n",
            r"config\.toml: compile.components: found \[\], expected ",
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
