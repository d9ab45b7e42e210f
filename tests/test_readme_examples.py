"""The pages' Python blocks run as printed, by the command in their first line.

Those of docs/recipes.md have tests of their own, in test_recipes.py.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.examples import DOCUMENTS, ROOT, assert_same, blocks, examples, run

PAGES = tuple(page for page in DOCUMENTS if page != "docs/recipes.md")
EXAMPLES = {
    "fsdp2.py": "README.md",
    "single.py": "docs/loops.md",
    "ddp.py": "docs/loops.md",
    "huggingface.py": "docs/loops.md",
    "rates.py": "docs/optimizers.md",
    "train.py": "docs/checkpoints.md",
    "trust.py": "CONTRIBUTING.md",
}
"""Each example has a test here."""

# Runs the script that it is given, but ends the process when a checkpoint has all its tensors and
# not yet its metadata: the worst moment.
KILLER = """\
import os
import runpy
import signal
import sys

from torch.distributed.checkpoint import FileSystemWriter

finish = FileSystemWriter.finish


def die_in(self, metadata, results):
    if str(self.path).endswith(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    return finish(self, metadata, results)


FileSystemWriter.finish = die_in
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def run_example(name: str, folder: Path) -> str:
    """Write the example into ``folder``, run it, and return what it printed."""
    command, text = examples(PAGES)[name]
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    done = run(command, folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_tested_here() -> None:
    found = {name: page for page in PAGES for name in examples([page])}
    assert found == EXAMPLES
    assert sum(text.startswith("# ") for text in blocks(PAGES)) == len(found)


def test_blocks_without_a_command_run_too() -> None:
    """A pattern, and a test that CONTRIBUTING.md shows, which is defined and not called."""
    given = {"torch": torch, "dist": torch.distributed, "Ranks": Any}
    fragments = [text for text in blocks(PAGES) if not text.startswith("# ")]
    defined = [given.copy() for _ in fragments]
    for text, names in zip(fragments, defined, strict=True):
        exec(text, names)
    assert [sorted(names.keys() - given.keys() - {"__builtins__"}) for names in defined] == [
        ["sum_of_ranks", "test_sum"],
        ["Fused", "dim", "heads", "parts", "patterns"],
    ]


def test_the_page_about_an_optimizer_of_ones_own_is_short() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    page = text.split("## An optimizer of your own\n")[1].split("\n## ")[0]
    assert len(page.strip().splitlines()) < 40  # and its heading


def test_an_optimizer_of_ones_own_on_two_ranks(tmp_path: Path) -> None:
    """Both ranks print the loss, perhaps into one line; it is about one at the start."""
    losses = [float(found) for found in re.findall(r"\d\.\d{3}", run_example("trust.py", tmp_path))]
    assert len(losses) == 2
    assert max(losses) < 0.5


def test_the_short_example_is_short() -> None:
    _, text = examples(PAGES)["fsdp2.py"]
    code = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert len(code) <= 12


@pytest.mark.parametrize("name", ["fsdp2.py", pytest.param("ddp.py", marks=pytest.mark.slow)])
def test_on_two_ranks(name: str, tmp_path: Path) -> None:
    # Both ranks print, word by word, and may do so into one line.
    printed = run_example(name, tmp_path)
    assert printed.count("12") == printed.count("locked") == 2, printed


def test_one_process(tmp_path: Path) -> None:
    assert run_example("single.py", tmp_path) == "12 locked\n"


def test_hugging_face(tmp_path: Path) -> None:
    printed = run_example("huggingface.py", tmp_path)
    assert printed.splitlines()[-1] == "12 locked"
    assert "lr_scale 0.5" in printed
    assert "weight_decay 0.0" in printed


def test_rates_of_torch_muon(tmp_path: Path) -> None:
    assert run_example("rates.py", tmp_path) == "3 [0.02, 0.0003]\n"


def newest_state(folder: Path) -> Any:
    """Everything in the last checkpoint of a run of ``train.py``."""
    whole = folder / "whole.pt"
    dcp_to_torch_save(folder / "checkpoints" / "step-000024", whole)
    return torch.load(whole, weights_only=False)


@pytest.mark.slow
def test_checkpoints_killed_inside_a_save_and_resumed(tmp_path: Path) -> None:
    undisturbed = run_example("train.py", tmp_path / "undisturbed").splitlines()
    assert [line.split()[1] for line in undisturbed] == [str(step) for step in range(1, 25)]
    assert [line.split()[2] for line in undisturbed[::12]] == ["observation", "transition"]

    folder = tmp_path / "killed"
    folder.mkdir()
    command, text = examples(PAGES)["train.py"]
    (folder / "train.py").write_text(text)
    (folder / "killer.py").write_text(KILLER)
    killed = run([*command[:-1], "killer.py", "train.py", "step-000018"], folder)
    assert killed.returncode != 0
    assert f"Signal {signal.SIGKILL.value} (SIGKILL)" in killed.stderr
    assert killed.stdout.splitlines() == undisturbed[:18]
    incomplete = folder / "checkpoints" / "step-000018"
    assert incomplete.exists()
    assert not (incomplete / ".metadata").exists()

    resumed = run_example("train.py", folder).splitlines()
    assert resumed == undisturbed[12:]
    assert_same(newest_state(folder), newest_state(tmp_path / "undisturbed"))
