"""The job config: what is accepted, and how mistakes are told."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own modules warn while torchtitan imports them
    from torchtitan_ext.config import settings

from torchtitan_ext import train

ROOT = Path(__file__).resolve().parents[2]
AMO = "[optimizer]\nname = 'AMO'\n[optimizer.amo]\nobserve_until = 8\nobserve_every = 4\n"
BYTE = "[data]\ntokenizer = 'byte'\n"


def parse(tmp_path: Path, toml: str, *args: str) -> Any:
    path = tmp_path / "config.toml"
    path.write_text(toml)
    return settings.parse(["--job.config_file", str(path), *args])


def test_fields_of_the_project_come_from_file_and_command_line(tmp_path: Path) -> None:
    config = parse(tmp_path, AMO + BYTE, "--optimizer.amo.budget_ratio", "0.9")
    assert config.optimizer.amo.observe_until == 8
    assert config.optimizer.amo.budget_ratio == 0.9
    assert config.optimizer.amo.shrinkage == 0.7  # default of the dataclass
    assert config.tokenizer.kind == "byte"


def test_what_stands_elsewhere_in_a_file_finds_its_place(tmp_path: Path) -> None:
    toml = """
    [job]
    dump_folder = "here"
    description = "a run"
    custom_config_module = "torchtitan_ext.job_config"
    [experimental]
    custom_import = "torchtitan_ext"
    [model]
    hf_assets_path = "there"
    [data]
    tokenizer = "byte"
    seed = 7
    [training]
    dataset = "stdlib"
    [validation]
    enable = true
    dataset = "c4_test"
    [profiling]
    profile_freq = 3
    """
    config = parse(tmp_path, AMO + toml)
    assert (config.dump_folder, config.description, config.hf_assets_path) == (
        *("here", "a run", "there"),
    )
    assert (config.tokenizer.kind, config.dataloader.seed) == ("byte", 7)
    assert (config.dataloader.dataset, config.validator.dataloader.dataset) == ("stdlib", "c4_test")
    assert config.validator.enable
    assert config.profiler.profile_freq == 3


def test_names_of_files_are_options_too_and_the_first_rank_tells_the_new_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = parse(
        tmp_path,
        AMO + BYTE + "[validation]\nenable = true\n",
        *("--job.dump_folder", "here", "--data.seed=7", "--data.text-field", "body"),
        *("--validation.no-enable", "--job.print-config", "--model.flavor", "tiny"),
        *("--job.custom_config_module", "torchtitan_ext.job_config"),
        "--experimental.custom_import=torchtitan_ext",
    )
    assert (config.dump_folder, config.dataloader.seed, config.dataloader.text_field) == (
        *("here", 7, "body"),
    )
    assert (config.validator.enable, config.debug.print_config) == (False, True)
    told = capsys.readouterr().err.splitlines()
    assert "note: --job.dump_folder is --dump_folder now" in told
    assert "note: --validation.no_enable is --validator.no_enable now" in told
    assert len(told) == 5


def test_what_follows_from_other_fields_is_settled_once_for_all(tmp_path: Path) -> None:
    config = parse(tmp_path, AMO + BYTE + "[model]\nname = 'llama3'\nflavor = 'tiny'\n")
    assert (config.model_spec.name, config.model_spec.flavor) == ("llama3", "tiny")
    assert config.loss.global_vocab_size == 320
    assert config.training.disable_cuda_graphs
    settled = config.to_dict()
    settings.settle(config)
    assert config.to_dict() == settled


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.toml")), ids=lambda f: f.stem)
def test_every_config_of_the_project_is_valid(file: Path) -> None:
    assert settings.parse([f"--job.config_file={file}"]).description


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[optimizer.amo]\nobserv_every = 3\n", "optimizer.amo.observ_every: unknown field; did "),
        ("[optimiser]\nlr = 1\n", "optimiser.lr: unknown field; did you mean 'optimizer.lr'"),
        ("[optimizer]\nlr = 'fast'\n", "optimizer.lr: found 'fast', expected a number"),
        ("[optimizer]\nlr = true\n", "optimizer.lr: found True, expected a number"),
        # A way that means no adjustment at all would train at another rate than was asked for.
        ("[optimizer]\nlr_from = 'law'\n", "lr_from: found 'law', expected one of 'value', 'sca"),
        ("[training]\nsteps = 1.5\n", "training.steps: found 1.5, expected an integer"),
        ("[data]\ntokenizer = 'bytes'\n", "found 'bytes', expected one of 'hf', 'byte'"),
        ("data = 3\n", "data: found 3, expected a section"),
        ("[training]\ndataset_path = 3\n", "training.dataset_path: found 3"),
        ("[checkpoint]\nexclude_from_loading = [1]\n", "exclude_from_loading: found \\[1\\]"),
        ("[optimizer.amo]\nobserve_every = 7\n", r"\[optimizer.amo\] observe_every: found 7, "),
        ("[optimizer.muon]\nmomentum = 1.0\n", r"\[optimizer.muon\] momentum: found 1.0, "),
        ("[optimizer]\nname = 'amo'\n", "optimizer.name: found 'amo', expected one of 'AMO'"),
        ("[training]\ndataset = 'fineweb-edu'\n", "training.dataset: found 'fineweb-edu', expect"),
        (
            "[training]\ndataset = 'stdlib'\n[validation]\nenable = true\ndataset = 'stdlb'\n",
            "validation.dataset: found 'stdlb', expected one of 'packed', 'text', ",
        ),
        ("[model]\nname = 'llama2'\n", "model.name: found 'llama2', expected one of "),
        ("[training]\ndataset = 'text'\n", "training.dataset_path: found none, expected a folder"),
        (
            "[training]\ndataset = 'stdlib'\n[data]\norder = 'ascend'\n",
            "data.score_field: found none, expected the field",
        ),
        (
            "[training]\nglobal_batch_size = 0\n",
            "training.global_batch_size: found 0, expected an integer >= 1, or -1 for",
        ),
        ("[training]\nseq_len = 0\n", "training.seq_len: found 0, expected an integer >= 1"),
        ("[fault_tolerance]\nenable = true\n", "fault_tolerance.enable: unknown field"),
        ("[experimental]\ncustom_import = 'mine'\n", "experimental.custom_import: unknown field"),
        ("[data]\ntext_fields = 'a'\n", "data.text_fields: unknown field; .* 'data.text_field'"),
        ("[validation]\nsteps = 0\n", r"\[validation\] validation steps must be positive"),
        ("[data\n", "is not TOML"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, toml: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(tmp_path, toml)


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


@pytest.mark.slow
def test_training_tells_a_mistake_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("[optimizer]\nlr = 'fast'\n")
    command = [sys.executable, "-m", "torchtitan_ext.train", "--job.config_file", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == train.USER_ERROR
    assert done.stderr == "error: optimizer.lr: found 'fast', expected a number\n"


def test_only_errors_of_the_project_lose_their_traceback() -> None:
    with pytest.raises(ValueError, match=r"found 'nowhere', expected a TOML file") as ours:
        settings.parse(["--job.config_file=nowhere"])
    with pytest.raises(ValueError, match="Expecting value") as others:
        json.loads("nothing")
    assert train.is_users_mistake(ours.value)
    assert not train.is_users_mistake(others.value)
