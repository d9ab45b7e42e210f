"""Trials through plain DCP: a run is killed, its checkpoints are damaged, it resumes elsewhere."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from tests.faults.damage import KINDS, Ledger, names_one
from tests.faults.series import Trial as SeriesTrial
from tests.faults.worker import SAVE_POINTS, STEPS, Kill, Run, main

POINTS = ("before_step", "in_step", *SAVE_POINTS)
PLANNERS = ("measured", "paper")
LAYOUTS = {
    1: ("plain",),
    2: ("plain", "fsdp", "fsdp", "tp"),
    3: ("plain", "fsdp", "fsdp", "tp"),
    4: ("plain", "fsdp", "hsdp", "tp"),
}
TIMEOUT = 120.0
"""Seconds for a run; a rank that waits for a dead one longer than that has hung."""
GRACE = 5.0
"""Seconds that the other ranks have to notice that one is gone."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """Runs over one folder of checkpoints; each but the last is killed.

    Attributes:
        runs: What they do.
        damages: After each killed run, how often the newest checkpoint is damaged, and how.
    """

    runs: tuple[Run, ...]
    damages: tuple[tuple[str, ...], ...]


def draw(rng: random.Random) -> Trial:
    """A random trial."""
    num_kills = rng.randint(1, 3)
    planner = rng.choice(PLANNERS)
    runs = []
    # At later steps each, so that most runs get to their end.
    for step in [*sorted(rng.sample(range(1, STEPS + 1), num_kills)), None]:
        world_size, save_every = rng.randint(1, 4), rng.randint(1, 3)
        kill = None if step is None else _draw_kill(rng, step, world_size, save_every)
        layout, saves_async = rng.choice(LAYOUTS[world_size]), rng.random() < 0.5
        runs.append(Run(world_size, layout, save_every, saves_async, kill, planner))
    damages = [tuple(rng.choices(KINDS, k=rng.choice((0, 1, 1, 2)))) for _ in range(num_kills)]
    return Trial(tuple(runs), tuple(damages))


def _draw_kill(rng: random.Random, step: int, world_size: int, save_every: int) -> Kill:
    point, ranks = rng.choice(POINTS), tuple(range(world_size))
    if point in SAVE_POINTS:
        step = min(-(-step // save_every), STEPS // save_every) * save_every
    if point in ("before_metadata", "before_checksums"):
        ranks = (0,)  # only the coordinator writes metadata; the others wait for it
    elif rng.random() < 0.5:
        ranks = (rng.randrange(world_size),)
    return Kill(step, point, ranks)


class Campaign:
    """Runs trials; forks ranks from a server that has trained once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.faults.warm"])
        self._number = 0
        self._references: dict[str, dict[str, Any]] = {}

    def reference(self, planner: str) -> dict[str, Any]:
        """An undisturbed run on one rank, made when first needed."""
        if planner not in self._references:
            run = Run(1, "plain", STEPS + 1, False, planner=planner)
            found = self.run(run, self._folder / f"reference-{planner}")[1]
            assert found is not None
            assert found["controls"][STEPS]["policy"]["plan"]["planner"] == planner
            self._references[planner] = found
        return self._references[planner]

    def run(self, run: Run, checkpoints: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """How the run resumed, and what rank 0 reported; None where the run was killed."""
        self._number += 1
        store, result, resumed = (
            self._folder / f"{name}{self._number}" for name in ("store", "result", "resumed")
        )
        processes: list[BaseProcess] = [
            self._context.Process(
                target=main, args=(rank, run, checkpoints, store, result, resumed)
            )
            for rank in range(run.world_size)
        ]
        for process in processes:
            process.start()
        exits = _wait(processes)
        how: dict[str, Any] = json.loads(resumed.read_text()) if resumed.exists() else {}
        store.unlink(missing_ok=True)
        if run.kill is None or set(exits) == {0}:
            assert set(exits) == {0}, exits
            assert run.kill is None or run.kill.step <= how["first"], exits
            loaded: dict[str, Any] = torch.load(result, weights_only=True)
            result.unlink()
            return how, loaded
        killed = [exits[rank] for rank in run.kill.ranks]
        # The last of several to get there may find its peers gone, and fail of that first.
        assert -9 in killed, exits
        assert 0 not in killed, exits
        return how, None

    def trial(self, trial: Trial, rng: random.Random) -> list[str]:
        """Kill, damage, resume, and compare in the end; returns what happened.

        Raises:
            AssertionError: Something that must be equal is not.
        """
        checkpoints = self._folder / f"checkpoints{self._number}"
        ledger, events = Ledger(checkpoints), [f"resumes: {len(trial.damages)}"]
        for run, damages in zip(trial.runs, (*trial.damages, ()), strict=True):
            expected, incomplete = ledger.expected(), ledger.incomplete()
            how, found = self.run(run, checkpoints)
            first = how["first"]
            assert first in expected.steps, (first, expected)
            for step, names in expected.damaged.items():
                if step > first:
                    reasons = how["told"].get(f"step-{step:04}", [])
                    assert names_one(names, "\n".join(reasons)), (names, reasons)
                    events.append("a damaged checkpoint named")
            if any(step > first for step in incomplete):
                events.append("resumed past an incomplete checkpoint")
            if run is not trial.runs[0]:
                events.append(f"resumed from {_phase(first)}")
            ledger.look()
            if found is not None:
                break  # the last one, or one past the step of its kill already
            events += filter(None, [ledger.harm(rng, kind) for kind in damages])
        assert found is not None
        self._compare(found, first, self.reference(run.planner))
        shutil.rmtree(checkpoints, ignore_errors=True)
        return events

    def _compare(self, found: dict[str, Any], first: int, reference: dict[str, Any]) -> None:
        assert found["first"] == first, (found["first"], first)
        assert set(found["controls"]) == set(range(first, STEPS + 1))
        for step, control in found["controls"].items():
            if step > 0:  # of the reference only what follows a step is kept
                assert control == reference["controls"][step], step
        for step, digests in found["schedules"].items():
            assert digests == reference["schedules"][step], step
        # Gradients are injected and a matrix is orthogonalized whole, so that no order of
        # reduction enters: not only the same world ends on the same bits.
        for name, expected in reference["params"].items():
            assert torch.equal(found["params"][name], expected), name


def _phase(step: int) -> str:
    if step == 0:
        return "the start"
    if step <= 4:
        return "the plan" if step == 4 else "the observation phase"
    if step < 7:
        return "the transition"
    return "the lock or later"


def _wait(processes: list[BaseProcess]) -> list[int | None]:
    """Exit codes; once one rank has died the others have ``GRACE`` seconds."""
    deadline = time.monotonic() + TIMEOUT
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        if any(process.exitcode not in (None, 0) for process in processes):
            deadline = min(deadline, time.monotonic() + GRACE)
        time.sleep(0.02)
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()
    return [process.exitcode for process in processes]


@contextlib.contextmanager
def trials() -> Iterator[SeriesTrial]:
    """Trials in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        for name, value in (("OMP_NUM_THREADS", "1"), ("GLOO_SOCKET_IFNAME", "lo")):
            if name not in os.environ:
                os.environ[name] = value
                stack.callback(os.environ.pop, name)
        campaign = Campaign(Path(folder))
        yield lambda rng: campaign.trial(draw(rng), rng)
