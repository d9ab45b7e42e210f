"""docs/extend.md as printed, through both doors: trained, killed, resumed to the bit."""

from __future__ import annotations

import os
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.examples import ROOT, code_blocks, examples
from tests.integration.processes import Command
from tests.integration.titan_ranks import Run, assert_same_end

pytestmark = pytest.mark.slow

PAGE = "docs/extend.md"
TEXT = (ROOT / PAGE).read_text()
FOLDERS = {"amo train": "outputs/mixer", "torchrun": "outputs/experiment"}
"""Dump folder by the start of the printed command."""
STEPS = 30


def write_files(folder: Path) -> None:
    """Write the files of the page."""
    for name, (_, text) in examples([PAGE]).items():
        (folder / name).write_text(text)
    (toml,) = code_blocks(TEXT, "toml")
    (folder / "mixer.toml").write_text(toml)


def launch(start: str, folder: Path) -> Command:
    (block,) = [block for block in code_blocks(TEXT, "bash") if block.startswith(start)]
    return Command(shlex.split(block.replace("\\\n", " ")), folder)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Whole runs by the start of their command."""
    folder = tmp_path_factory.mktemp("whole")
    write_files(folder)
    for start in FOLDERS:
        launch(start, folder).end()
    return {start: Run(folder / run, 2) for start, run in FOLDERS.items()}


def options_of(name: str, state: dict[str, Any]) -> tuple[float, float]:
    """Peak rate and decay of the parameter whose name holds a word."""
    options = {
        field: next(state[k] for k in state if name in k and k.endswith(f".{field}"))
        for field in ("initial_lr", "muon_lr_factor", "weight_decay")
    }
    return options["initial_lr"] * options["muon_lr_factor"], options["weight_decay"]


@pytest.mark.parametrize("start", FOLDERS)
def test_a_kill_changes_no_bit(tmp_path: Path, undisturbed: dict[str, Run], start: str) -> None:
    write_files(tmp_path)
    run = Run(tmp_path / FOLDERS[start], 2)
    command = launch(start, tmp_path)
    command.wait_until(lambda: 12 in run.losses())
    os.kill(run.first_rank(), signal.SIGKILL)
    command.end(1)
    launch(start, tmp_path).end()
    assert_same_end(run, undisturbed[start], STEPS)
    notes = (run.folder / "notes.txt").read_text().splitlines()
    assert notes == ["plan 8", "save 10", "save 20", f"save {STEPS}"]


def test_groups_figures_and_losses_are_those_of_the_page(undisturbed: dict[str, Run]) -> None:
    expected = {"words": (3e-3, 0.1), "router": (3e-4, 0.1), "scale": (3e-3, 0.0)}
    losses = [run.losses() for run in undisturbed.values()]
    assert losses[0] == losses[1]
    assert losses[0][STEPS] < losses[0][1] - 1.0
    for run in undisturbed.values():
        state = run.state(STEPS)["optimizer"]
        for name, values in expected.items():
            assert options_of(name, state) == pytest.approx(values)
        record = run.records()[-1]
        assert record["phase"] == "locked"
        assert record["router_norm"] > 0
        assert record["distance_from_average"] > 0
        averages = run.state(STEPS)["callbacks"]["average.Average"]
        assert averages["count"] == STEPS
        # An average of the last ten steps or so lies nearer to the end than a rate of 3e-3 a step.
        weights = run.state(STEPS)
        for name, average in averages["averages"].items():
            distance = (average - weights[name]).abs().max()
            assert 0 < distance < 10 * STEPS * 3e-3
        assert set(record["num_steps_by_type"]) == {"mlp_up", "mlp_down"}
