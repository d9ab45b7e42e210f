"""Every writer of a run's files, killed at every call that touches a file; what readers then find.

``python -m tests.unit.killed_writers FOLDER`` prints JSON: how often each writer was killed, and a
line for each reader that failed or missed what had been written.
"""

from __future__ import annotations

import argparse
import builtins
import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from amo_dist.config import AMOConfig
from amo_dist.schedule.plan import Plan
from amo_dist.schedule.planning import plan_allocation
from benchmarks.amo_paper import evaluate, static_schedule
from benchmarks.amo_paper.results import read_results
from torchtitan_ext.plugin.geometry import GeometryLog
from torchtitan_ext.runs import records, run_files
from torchtitan_ext.tools.report import data

CALLS = ("open", "write", "fsync", "replace", "rename", "unlink", "truncate", "ftruncate")
CONFIGS = [{"optimizer": {"lr": lr}, "text": "x" * 20_000} for lr in (0.1, 0.2)]
PLANS = [
    plan_allocation(AMOConfig.paper(), {"attn_q": ell, "mlp_up": 3e-3}).to_json()
    for ell in (1e-3, 1e-5)
]
RESULTS = [{"model": "m", "optimizer": "AMO", "tasks": {"sciq": x}} for x in (50.0, 60.0)]


def record(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 1 / (3 + step),
        "phase": "uniform",
        "num_steps_by_type": {"attn_q": 5},
        "optimizer": {f"figure/{i}": i / 7 for i in range(600)},  # more than a buffer holds
    }


def geometry(step: int) -> list[Any]:
    sizes = {"sigma_min": 1e-3, "sigma_max": 2.0, "frobenius": 3.0}
    return [{"step": step, "operator_type": "attn_q", "name": f"m{i}", **sizes} for i in range(90)]


class Killer:
    """Ends the process at a call, as a kill does: nothing is flushed, nothing is cleaned up.

    Args:
        point: Which of all moments before, amid and after a call it is.
    """

    def __init__(self, point: int) -> None:
        self._left = point

    def install(self) -> None:
        for name in CALLS:
            setattr(os, name, self._deadly(getattr(os, name)))
        io.open = builtins.open = self._deadly(io.open)
        whole = os.write

        def write(file: int, data: bytes) -> int:
            self._moment(lambda: whole(file, bytes(data)[: len(data) // 2]))
            return whole(file, data)

        os.write = write  # type: ignore[assignment]

    def _deadly(self, call: Any) -> Any:
        def called(*args: Any, **options: Any) -> Any:
            self._moment()
            found = call(*args, **options)
            self._moment()
            return found

        return called

    def _moment(self, last_act: Callable[[], object] = lambda: None) -> None:
        if self._left == 0:
            self._left = -1  # the last act is a call, too
            last_act()
            os._exit(9)
        self._left -= 1


def prepare(folder: Path) -> None:
    """What a run of three steps with a plan has left."""
    files = run_files.RunFiles(folder)
    files.start(1, CONFIGS[0])
    log = GeometryLog(folder, model="m", family="f")
    for step in (1, 2, 3):
        files.append(record(step))
        if step == 1:
            files.append_validation(step, 2.5)
        log.append(geometry(step), 1)
    files.save_plan(PLANS[0])
    files.close()
    evaluate.write(RESULTS[0], folder / "results.json")


def start(folder: Path) -> None:
    run_files.RunFiles(folder).start(3, CONFIGS[1])


def static(folder: Path) -> None:
    log, output = str(folder / "geometry.jsonl"), str(folder / "schedule.toml")
    parser = argparse.ArgumentParser()
    static_schedule.add_commands(parser.add_subparsers())
    args = parser.parse_args(["static-schedule", log, "-o", output])
    static_schedule.run(args)


WRITERS: dict[str, tuple[Callable[[Path], object], int]] = {
    "config": (lambda folder: run_files.save_config(folder, CONFIGS[1]), 3),
    "start": (start, 2),
    "metrics": (lambda folder: run_files.RunFiles(folder).append(record(4)), 3),
    "validation": (lambda folder: run_files.RunFiles(folder).append_validation(3, 2.0), 3),
    "plan": (lambda folder: run_files.RunFiles(folder).save_plan(PLANS[1]), 3),
    "geometry": (lambda folder: GeometryLog(folder, model="m").append(geometry(4), 4), 3),
    "results": (lambda folder: evaluate.write(RESULTS[1], folder / "results.json"), 3),
    "static schedule": (static, 3),
}
"""By name; and how many of the three steps are still there, whenever the writer is killed."""


def problems(folder: Path, num_steps: int, name: str) -> list[str]:
    """What readers miss after a kill."""
    found = []

    def expect(what: str, read: Callable[[], bool]) -> None:
        try:
            if not read():
                found.append(f"{what}: not what was written")
        except Exception as error:
            found.append(f"{what}: {type(error).__name__}: {error}")

    def steps(file: str, times: int = 1) -> list[int]:
        found = records.read_records(folder / file)
        return [one["step"] for one in found if run_files.VALIDATION not in one][::times]

    kept = [*range(1, num_steps + 1)]
    expect("metrics", lambda: steps("metrics.jsonl")[:num_steps] == kept)
    expect("geometry", lambda: steps("geometry.jsonl", 90)[:3] == [1, 2, 3])
    expect("config", lambda: run_files.read_config(folder) in CONFIGS)
    if name != "start" or (folder / "plan.json").exists():  # which goes where a run begins
        plans = [Plan.from_json(plan) for plan in PLANS]
        expect("plan", lambda: Plan.from_json((folder / "plan.json").read_text()) in plans)
    expect("results", lambda: len(read_results([folder / "results.json"])) == 1)
    expect("report", lambda: data.load_one(folder).metrics[0]["step"] == 1)
    expect("validation", lambda: run_files.read_metrics(folder).validations[:1] == [(1, 2.5)])
    if (schedule := folder / "schedule.toml").exists():
        expect("schedule", lambda: "coefficients" in schedule.read_text())
    return found


def killed(write: Callable[[Path], object], folder: Path, point: int) -> bool:
    """Whether the writer was killed at this point, and not at its end before."""
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        Killer(point).install()
        try:
            write(folder)
        except BaseException:
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9), status
    return status == 9


def campaign(root: Path) -> dict[str, Any]:
    """Kill every writer at every point, each time in a copy of the same run."""
    whole = root / "whole"
    prepare(whole)
    kills: dict[str, int] = {}
    told = []
    for name, (write, num_steps) in WRITERS.items():
        kills[name] = 0
        while True:
            folder = root / "killed"
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(whole, folder)
            if not killed(write, folder, kills[name]):
                break
            told += [f"{name}, {kills[name]}: {one}" for one in problems(folder, num_steps, name)]
            kills[name] += 1
    return {"kills": kills, "problems": told}


if __name__ == "__main__":
    print(json.dumps(campaign(Path(sys.argv[1]))))
