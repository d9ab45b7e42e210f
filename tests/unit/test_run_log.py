"""A plain loop writes what `amo report` reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import runs
from torchtitan_ext.cli import main
from torchtitan_ext.runs.run_files import read_plan
from torchtitan_ext.runs.run_log import RunLog
from torchtitan_ext.tools.report import data


def test_a_plain_loop_is_reported_through_its_lock_and_a_restart(tmp_path: Path) -> None:
    model, optimizer = runs.make()  # locks at step 7
    log = RunLog(tmp_path / "run", optimizer, num_steps=12)
    for number in range(1, 9):
        runs.train(model, optimizer, number, number)
        if number % 4 == 0:
            log(torch.tensor(0.5), num_tokens=100 * number, grad_norm=torch.tensor(2.0))
        if number == 6:
            saved = optimizer.state_dict()
    model, optimizer = runs.make()  # goes on after step 6: what was written of step 8 is no more
    optimizer.load_state_dict(saved)
    log = RunLog(tmp_path / "run", optimizer, num_steps=12)
    for number in range(7, 13):
        runs.train(model, optimizer, number, number)
        log(torch.tensor(0.5), num_tokens=100 * number)
    run = data.load(tmp_path / "run")
    assert [record["step"] for record in run.metrics] == [4, *range(7, 13)]
    assert run.metrics[0]["grad_norm"] == 2.0
    assert run.metrics[-1]["tokens_per_second"] > 0
    # Of the steps 1 to 4, 5 to 7, and then of each.
    assert run.spans("phase") == [("observation", 1, 4), ("locked", 5, 12)]
    assert run.plan == read_plan(tmp_path / "run") == optimizer.plan
    pytest.importorskip("matplotlib")
    assert main(["report", str(tmp_path / "run"), "-o", str(tmp_path / "r.html")]) == 0
    assert "<td>7</td>" in (tmp_path / "r.html").read_text()  # the step of the lock


def test_an_optimizer_of_another_family_is_logged_by_number(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    log = RunLog(tmp_path, torch.optim.AdamW([parameter], lr=0.5))
    with pytest.raises(ValueError, match="step: found none with AdamW, expected the number"):
        log(1.0)
    log(1.0, step=1)
    (record,) = data.load(tmp_path).metrics
    assert (record["step"], record["lr"], record["phase"]) == (1, 0.5, "")
