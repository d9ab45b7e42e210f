"""The front door is light: commands that plan or watch must not wait for torchtitan."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from torchtitan_ext import cli
from torchtitan_ext.tools import train as command

ROOT = Path(__file__).parents[2]


def test_the_commands_import_neither_torchtitan_nor_the_extras() -> None:
    # Training patches torchtitan's view of the machine, which must be done before its first import.
    heavy = {"torchtitan", "tyro", "matplotlib", "scipy", "transformers", "datasets", "lm_eval"}
    code = f"import sys, torchtitan_ext.cli; print(sorted({heavy!r} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["experiments", "list"], ["plan", "--ell", "attn_q=3e-4"], ["watch", "."]],
    ids=lambda arguments: arguments[0],
)
def test_a_reader_that_has_seen_enough_is_no_failure(arguments: list[str], tmp_path: Path) -> None:
    """As in ``amo plan ... | head``, whose pipe nobody reads any more."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "torchtitan_ext", *arguments],
            stdout=pipe,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    assert (done.returncode, done.stderr) == (0, "")


WITHOUT = """
import sys
for name in ("torchtitan", "torchdata", "tiktoken", "tyro"):
    sys.modules[name] = None
from torchtitan_ext.cli import main
statuses = [main(arguments) for arguments in {commands!r}]
print(statuses)
"""


def without_torchtitan(*commands: list[str]) -> subprocess.CompletedProcess[str]:
    code = WITHOUT.format(commands=commands)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )


def test_what_needs_no_torchtitan_runs_without_it() -> None:
    done = without_torchtitan(
        ["--help"], ["experiments", "list"], ["plan", "--ell", "attn_q=3e-4"], ["watch", "."]
    )
    assert done.stdout.splitlines()[-1] == "[0, 0, 0, 0]"
    assert done.stderr == ""


def test_what_needs_torchtitan_says_in_one_line_what_to_install() -> None:
    config = "configs/quickstart.toml"
    done = without_torchtitan(
        ["train", config],
        ["quickstart"],
        ["preflight", "--job.config_file", config],
        ["tokenize", "tests", "-o", "nowhere", "--tokenizer", "byte"],
        ["export", "step-1", "-o", "nowhere", "--config", config],
    )
    assert done.stdout.splitlines()[-1] == "[2, 2, 2, 2, 2]"
    lines = done.stderr.splitlines()
    assert len(lines) == 5
    for line in lines:
        assert line.startswith("error: ")
        assert "pip install 'amo-dist[titan]'" in line


def test_a_module_that_is_missing_elsewhere_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(*_: object) -> int:
        raise ModuleNotFoundError("no module named 'mine'", name="mine")

    monkeypatch.setattr(cli, "run_command", run)
    with pytest.raises(ModuleNotFoundError, match="mine"):
        cli.main(["train", "x.toml"])


@pytest.mark.parametrize("is_rank", [False, True])
def test_train_is_the_only_rank_unless_it_is_one(
    monkeypatch: pytest.MonkeyPatch, is_rank: bool
) -> None:
    given = {"RANK": "1", "WORLD_SIZE": "2"} if is_rank else {"MASTER_ADDR": "here"}
    seen: dict[str, str] = {}
    asked: list[str] = []

    def train(arguments: list[str]) -> int:
        asked.extend(arguments)
        seen.update({name: os.environ[name] for name in command.ALONE if name in os.environ})
        return 7

    monkeypatch.setattr(command.train, "main", train)
    with mock.patch.dict(os.environ):  # what the command sets is gone afterwards
        for name in command.ALONE:
            os.environ.pop(name, None)
        os.environ.update(given)
        assert cli.main(["train", "x.toml", "--training.steps", "5", "--geometry.enable"]) == 7
    assert asked == ["--job.config_file", "x.toml", "--training.steps", "5", "--geometry.enable"]
    assert seen == (given if is_rank else {**command.ALONE, **given})


def test_an_error_that_is_no_mistake_of_the_user_s_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")

    def train(_: list[str]) -> int:
        raise ValueError("deep down")

    monkeypatch.setattr(command.train, "main", train)
    assert cli.main(["train", "x.toml"]) == 1
    assert "Traceback" in capsys.readouterr().err
