"""The front door is light: commands that plan must not wait for torchtitan."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from torchtitan_ext import cli
from torchtitan_ext.plugin import machine
from torchtitan_ext.tools import train as command

ROOT = Path(__file__).parents[2]
COMMANDS = (*("train", "preflight", "tokenize", "report", "export", "plan", "doctor"),)


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_imports_neither_torch_nor_the_extras(command: str) -> None:
    # torch alone takes a second to import. Training patches torchtitan's view of the machine, which
    # must be done before its first import.
    heavy = {"torch", "numpy", "torchtitan", "tyro", "matplotlib", "scipy", "transformers"}
    code = (
        f"import sys, torchtitan_ext.cli as cli; cli.main({[*command.split(), '--help']!r}); "
        f"print(sorted({heavy | {'datasets', 'rich'}!r} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    usage, *_, modules = result.stdout.splitlines()
    assert usage.startswith("usage: ")
    assert modules == "[]"


@pytest.mark.parametrize(
    ("started", "program"),
    [("/somewhere/torchtitan_ext/__main__.py", "python -m torchtitan_ext"), ("/bin/amo", "amo")],
)
def test_help_names_the_program_that_was_started(
    started: str,
    program: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [started])
    assert cli.main(["plan", "--help"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert f"examples: {program} plan --ell" in told


@pytest.mark.parametrize(
    "arguments", [["--help"], ["plan", "--ell", "attn_q=3e-4"]], ids=lambda arguments: arguments[0]
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
for name in ("torchtitan", "torchdata", "tyro"):
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
        ["--help"],
        ["plan", "--ell", "attn_q=3e-4"],
    )
    assert done.stdout.splitlines()[-1] == "[0, 0]"
    assert done.stderr == ""


def test_what_needs_torchtitan_says_in_one_line_what_to_install() -> None:
    config = "configs/quickstart.toml"
    done = without_torchtitan(
        ["train", config],
        ["preflight", config],
        ["tokenize", "tests", "-o", "nowhere", "--tokenizer", "byte"],
        ["export", "step-1", "-o", "nowhere", "--config", config],
    )
    assert done.stdout.splitlines()[-1] == "[2, 2, 2, 2]"
    lines = done.stderr.splitlines()
    assert len(lines) == 4
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


QUICKSTART = str(ROOT / "configs" / "quickstart.toml")


@pytest.mark.parametrize("is_rank", [False, True])
def test_train_is_the_only_rank_unless_it_is_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_rank: bool
) -> None:
    given = {"RANK": "1", "WORLD_SIZE": "2"} if is_rank else {"MASTER_ADDR": "here"}
    options = [f"--dump_folder={tmp_path}", "--training.steps", "80", "--geometry.enable"]
    ranks = [] if is_rank else ["--ranks", "1"]
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
        assert cli.main(["train", QUICKSTART, *ranks, *options]) == 7
    assert asked == ["--job.config_file", QUICKSTART, *options]
    assert seen == (given if is_rank else {**command.ALONE, **given})


def test_an_error_that_is_no_mistake_of_the_user_s_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")

    def train(_: list[str]) -> int:
        raise ValueError("deep down")

    monkeypatch.setattr(command.train, "main", train)
    assert cli.main(["train", "x.toml"]) == 1  # under torchrun
    assert "Traceback" in capsys.readouterr().err


# ------------------------------------------------------------------ several ranks


@pytest.mark.parametrize(
    ("gpus", "options", "expected"),
    [
        (0, [], 2),
        (0, ["--ranks", "4", "--training.local_batch_size=4"], 4),
        (4, [], 2),  # 16 sequences in batches of 8
        (4, ["--training.local_batch_size=4"], 4),
        (8, ["--training.local_batch_size=2"], 8),
    ],
)
def test_train_picks_as_many_ranks_as_the_config_fits(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    gpus: int,
    options: list[str],
    expected: int,
) -> None:
    started: list[int] = []

    def start(_: list[str], _config: Any, ranks: int, **more: Any) -> int:
        assert more["nodes"] == 1
        started.append(ranks)
        return 5

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(command, "start", start)
    monkeypatch.setattr(machine, "num_gpus", lambda: gpus)
    monkeypatch.setattr(machine, "gpu_memory_gb", lambda: 80.0)
    folder = f"--dump_folder={tmp_path / 'run'}"
    assert cli.main(["train", QUICKSTART, folder, *options]) == 5
    assert started == [expected]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--ranks", "3"], ["training.global_batch_size: found 16"]),
        (["--tokenizer.kind=hf", "--hf_assets_path=gone"], ["hf_assets_path: found no tokenizer"]),
    ],
)
def test_train_tells_all_mistakes_before_a_rank_starts(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    told: list[str],
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(command, "start", lambda *_, **__: pytest.fail("started"))
    folder = f"--dump_folder={tmp_path / 'run'}"
    assert cli.main(["train", QUICKSTART, folder, *options]) == 2
    lines = capsys.readouterr().err.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == len(told)
    for line, start in zip(errors, told, strict=True):
        assert line.startswith(f"error: {start}")
