"""Callbacks of a run on two ranks: their order, and a stop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.titan_ranks import Job, Run, Server

pytestmark = pytest.mark.slow

MODULE = "tests.integration.own_callbacks"


def test_callbacks_run_at_their_points_on_all_ranks(titan: Server, tmp_path: Path) -> None:
    arguments = (f"--metrics.callbacks={MODULE}.Recorder", "--checkpoint.enable")
    job = Job(2, str(tmp_path), (*arguments, "--checkpoint.interval=3"), die_at=(1, 5, "SIGTERM"))
    assert titan.wait(titan.start(job)) == [75, 75]  # stopped, and saved
    run = Run(tmp_path, 2)
    expected = []
    for step in range(1, 6):
        plan = [["on_plan", step]] if step == 4 else []
        expected += [["before_step", step], *plan, ["after_step", step], ["log_metrics", step]]
        expected += [["on_save", step]] if step == 3 else []
    expected += [["on_save", 5], ["on_stop", 5]]
    for rank in range(2):
        lines = (tmp_path / f"calls{rank}.jsonl").read_text().splitlines()
        calls = [json.loads(line) for line in lines]
        # The vote may learn of the signal one step later.
        assert calls[: len(expected) - 2] == expected[:-2]
        assert [method for method, _ in calls[-2:]] == ["on_save", "on_stop"]
    assert [record["tenfold_step"] for record in run.records()][:5] == [10, 20, 30, 40, 50]
