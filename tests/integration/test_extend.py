"""docs/extend.md as printed, through both doors: trained, killed, resumed to the bit."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.examples import ROOT, code_blocks, examples
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


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Whole runs by the start of their command."""
    folder = tmp_path_factory.mktemp("whole")
    write_files(folder)
    for start in FOLDERS:
        status = launch(start, folder).wait(timeout=400)
        assert status == 0, (folder / "output.txt").read_text()[-4000:]
    return {start: Run(folder / run, 2) for start, run in FOLDERS.items()}


def launch(start: str, folder: Path) -> subprocess.Popen[bytes]:
    (block,) = [block for block in code_blocks(TEXT, "bash") if block.startswith(start)]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment["PYTHONPATH"] = str(ROOT)
    with (folder / "output.txt").open("ab") as output:
        return subprocess.Popen(
            shlex.split(block.replace("\\\n", " ")),
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=output,
        )


def steps(run: Path) -> list[int]:
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line)["step"] for line in lines]


def kill_at(step: int, process: subprocess.Popen[bytes], run: Path) -> None:
    """Kill rank 1 once a step is logged, and wait for the process."""
    deadline = time.monotonic() + 300
    while not (done := steps(run)) or done[-1] < step:
        assert process.poll() is None, (run.parents[1] / "output.txt").read_text()[-4000:]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    kill_rank_1(process.pid)
    process.wait(timeout=120)


def kill_rank_1(parent: int) -> None:
    for path in Path("/proc").glob("[0-9]*"):
        try:
            is_child = re.search(rf"^PPid:\s{parent}$", (path / "status").read_text(), re.MULTILINE)
            if is_child and b"\0RANK=1\0" in b"\0" + (path / "environ").read_bytes():
                os.kill(int(path.name), signal.SIGKILL)
        except OSError:
            continue


def options_of(name: str, state: dict[str, Any]) -> tuple[float, float]:
    """Peak rate and decay of the parameter whose name holds a word."""
    options = {
        field: next(state[k] for k in state if name in k and k.endswith(f".{field}"))
        for field in ("initial_lr", "lr_multiplier", "weight_decay")
    }
    return options["initial_lr"] * options["lr_multiplier"], options["weight_decay"]


@pytest.mark.parametrize("start", FOLDERS)
def test_an_experiment_is_killed_and_resumed_to_the_bit(
    tmp_path: Path, undisturbed: dict[str, Run], start: str
) -> None:
    write_files(tmp_path)
    run, output = tmp_path / FOLDERS[start], tmp_path / "output.txt"
    process = launch(start, tmp_path)
    kill_at(12, process, run)
    assert process.returncode != 0
    assert 10 in Run(run, 2).complete()
    assert launch(start, tmp_path).wait(timeout=400) == 0, output.read_text()[-4000:]
    assert_same_end(Run(run, 2), undisturbed[start], STEPS)
    notes = (run / "notes.txt").read_text().splitlines()
    assert notes == ["plan 8", "save 10", "save 20", f"save {STEPS}"]


def test_groups_figures_and_losses_are_those_of_the_page(undisturbed: dict[str, Run]) -> None:
    expected = {"words": (3e-3, 0.1), "router": (3e-4, 0.1), "scale": (3e-3, 0.0)}
    losses = [run.losses() for run in undisturbed.values()]
    assert losses[0] == losses[1]
    assert losses[0][STEPS] < losses[0][1] - 1.0
    for run in undisturbed.values():
        state = run.state(STEPS)
        for name, values in expected.items():
            assert options_of(name, state) == pytest.approx(values)
        record = run.records()[-1]
        assert record["phase"] == "locked"
        assert record["router_norm"] > 0
        assert set(record["num_steps_by_type"]) == {"mlp_up", "mlp_down"}
