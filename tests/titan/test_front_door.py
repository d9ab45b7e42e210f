"""The front door is light: commands that plan must not wait for torchtitan."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples import ROOT, run
from torchtitan_ext import cli

NAMES = ("train", "preflight", "tokenize", "report", "export", "plan", "doctor")
COMMANDS = [[], *([name] for name in NAMES)]


def python(*words: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """A process of its own, at its end."""
    return run([sys.executable, *words], folder, warnings="default")


def test_help_imports_neither_torch_nor_the_extras() -> None:
    # torch alone takes a second to import. Training patches torchtitan's view of the machine, which
    # must be done before its first import.
    heavy = {"torch", "numpy", "torchtitan", "tyro", "matplotlib", "scipy", "transformers"}
    code = (
        "import sys, torchtitan_ext.cli as cli\n"
        f"for command in {COMMANDS!r}: cli.main([*command, '--help'])\n"
        f"print(sorted({heavy | {'datasets', 'rich'}!r} & set(sys.modules)))"
    )
    lines = python("-c", code).stdout.splitlines()
    assert sum(line.startswith("usage: ") for line in lines) == len(COMMANDS)
    assert lines[-1] == "[]"


WITHOUT = """
import sys
for name in ("torchtitan", "torchdata", "tyro"):
    sys.modules[name] = None
from torchtitan_ext.cli import main
print([main(arguments) for arguments in {commands!r}])
"""


def test_commands_without_torchtitan_run_or_name_the_extra() -> None:
    config = "configs/quickstart.toml"
    commands = [
        ["--help"],
        ["plan", "--ell", "attn_q=3e-4"],
        ["train", config],
        ["preflight", config],
        ["tokenize", "tests", "-o", "nowhere", "--tokenizer", "byte"],
    ]
    done = python("-c", WITHOUT.format(commands=commands))
    assert done.stdout.splitlines()[-1] == "[0, 0, 2, 2, 2]"
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 3
    assert done.stderr.startswith("loading ")  # printed before what takes seconds
    assert all("pip install 'amo-dist[titan]'" in line for line in errors)


def test_another_missing_module_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(*_: object) -> int:
        raise ModuleNotFoundError("no module named 'mine'", name="mine")

    monkeypatch.setattr(cli, "run_command", run)
    with pytest.raises(ModuleNotFoundError, match="mine"):
        cli.main(["train", "x.toml"])


def test_a_rank_of_torchrun_becomes_the_rank(tmp_path: Path) -> None:
    """The command under torchrun trains in its own process, with torchtitan's arguments.

    ``RANK`` alone is none of torchrun's: Kubeflow's operators number their pods by it.
    """
    code = (
        "import os, sys\n"
        "os.execv = lambda program, words: print(words[1:])\n"
        "from torchtitan_ext.cli import main\n"
        "main(['train', 'x.toml', '--ranks', '2', '--training.steps=3'])\n"
    )
    rank = ["env", "RANK=1", "WORLD_SIZE=4", "LOCAL_RANK=1"]
    words = [sys.executable, "-c", code]
    torchruns = run([*rank, "TORCHELASTIC_RUN_ID=a", *words], tmp_path, warnings="default")
    module = ["-u", "-m", "torchtitan_ext.train"]
    expected = [*module, "--job.config_file", "x.toml", "--training.steps=3"]
    assert torchruns.stdout.splitlines()[0] == str(expected)
    left_over = run([*rank, *words], tmp_path, warnings="default")
    assert left_over.stdout == ""
    assert "error: job.config_file: cannot read x.toml" in left_over.stderr


def test_no_file_commands_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[optimizer]\nname = "\\u001b[2J"\n')
    assert cli.main(["preflight", str(file), "--world", "2"]) == 1
    output, errors = capsys.readouterr()
    assert "\x1b" not in output + errors


PLAN = "-m torchtitan_ext plan --ell attn_q=3e-4"


def test_a_reader_that_closes_its_end_is_no_failure() -> None:
    """As in ``amo plan ... | head``."""
    program = f"exec > >(:); wait $!; exec python {PLAN}"
    done = run(["bash", "-c", program], ROOT)
    assert (done.returncode, done.stderr) == (0, "")
