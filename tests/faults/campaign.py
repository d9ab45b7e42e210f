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
from unittest import mock

import torch

from tests.faults.damage import KINDS, Ledger
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
        runs: Every run, in order.
        damages: Kinds of damage to the newest checkpoint after each killed run.
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
            outcome = self.run(run, self._folder / f"reference-{planner}")[1]
            assert outcome is not None
            self._references[planner] = outcome
        return self._references[planner]

    def run(self, run: Run, checkpoints: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """The resume of a run, and the report of its rank 0; None where the run was killed."""
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
        resume: dict[str, Any] = json.loads(resumed.read_text()) if resumed.exists() else {}
        store.unlink(missing_ok=True)
        if run.kill is None or set(exits) == {0}:
            assert set(exits) == {0}, exits
            assert run.kill is None or run.kill.step <= resume["first"], exits
            return resume, torch.load(result, weights_only=True)
        killed = [exits[rank] for rank in run.kill.ranks]
        # The last of several to get there may find its peers gone, and fail of that first.
        assert -9 in killed, exits
        assert 0 not in killed, exits
        return resume, None

    def trial(self, trial: Trial, rng: random.Random) -> list[str]:
        """Kills, damages, resumes, and compares in the end; returns the events.

        Raises:
            AssertionError: Something that must be equal is not.
        """
        checkpoints = self._folder / f"checkpoints{self._number}"
        ledger, events = Ledger(checkpoints), ["resumes"] * len(trial.damages)
        for run, damages in zip(trial.runs, (*trial.damages, ()), strict=True):
            step, named = ledger.expected()
            resume, outcome = self.run(run, checkpoints)
            assert resume["first"] == step, (resume, step)
            for later, names in named.items():
                text = "\n".join(resume["errors"][f"step-{later:04}"])
                assert any(name in text for name in names), (names, text)
                events.append("a damaged checkpoint named")
            if outcome is not None:
                break  # the last one, or one past the step of its kill already
            events += filter(None, [ledger.harm(rng, kind) for kind in damages])
        assert outcome is not None
        reference = self.reference(run.planner)
        assert set(outcome["controls"]) == set(range(step, STEPS + 1))
        for after, control in outcome["controls"].items():
            assert not after or control == reference["controls"][after], after
        for after, digests in outcome["schedules"].items():
            assert digests == reference["schedules"][after], after
        # Gradients are injected and a matrix is orthogonalized whole, so that no order of
        # reduction enters: not only the same world ends on the same bits.
        for name, expected in reference["params"].items():
            assert torch.equal(outcome["params"][name], expected), name
        shutil.rmtree(checkpoints, ignore_errors=True)
        return events


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
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | os.environ
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, environment):
        campaign = Campaign(Path(folder))
        yield lambda rng: campaign.trial(draw(rng), rng)
