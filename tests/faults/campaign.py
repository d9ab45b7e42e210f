"""Trials: a run that is killed, a run that resumes, and what must be equal."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from tests.faults.worker import STEPS, Kill, Run, main, newest_complete

POINTS = ("before_step", "in_step", "in_save", "before_metadata")
OBJECTIVES = ("measured", "projected")
TIMEOUT = 120.0
"""Seconds for a run; a rank that waits for a dead one longer than that has hung."""
GRACE = 5.0
"""Seconds that the other ranks have to notice that one is gone."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """Two runs over one folder of checkpoints."""

    before: Run
    after: Run


def draw(rng: random.Random) -> Trial:
    """A random trial."""
    before_size, after_size = rng.randint(1, 4), rng.randint(1, 4)
    save_every, saves_async = rng.randint(1, 3), rng.random() < 0.5
    point = rng.choice(POINTS)
    step = rng.randint(1, STEPS)
    if point in ("in_save", "before_metadata"):
        step = min(-(-step // save_every), STEPS // save_every) * save_every
    ranks = tuple(range(before_size))
    if point == "before_metadata":
        ranks = (0,)  # only the coordinator writes metadata; the others wait for it
    elif rng.random() < 0.5:
        ranks = (rng.randrange(before_size),)
    kill, replans = Kill(step, point, ranks), rng.random() < 0.5
    before, after = _layout(rng, before_size), _layout(rng, after_size)
    objective = rng.choice(OBJECTIVES)
    return Trial(
        Run(before_size, before, save_every, saves_async, kill, replans, objective),
        Run(after_size, after, save_every, saves_async, None, replans, objective),
    )


def _layout(rng: random.Random, world_size: int) -> str:
    if world_size == 1:
        return "plain"
    return "hsdp" if world_size == 4 and rng.random() < 0.5 else "fsdp"


class Campaign:
    """Runs trials; forks ranks from a server that has imported torch once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.faults.worker"])
        self._number = 0
        self._references: dict[tuple[bool, str], dict[str, Any]] = {}

    def reference(self, replans: bool, objective: str) -> dict[str, Any]:
        """An undisturbed run on one rank, made when first needed."""
        key = replans, objective
        if key not in self._references:
            run = Run(1, "plain", STEPS + 1, False, replans=replans, objective=objective)
            found = self.run(run, self._folder / f"reference{replans}{objective}")
            assert found is not None
            assert found["controls"][STEPS]["policy"]["plan"]["criterion"] == objective
            self._references[key] = found
        return self._references[key]

    def run(self, run: Run, checkpoints: Path) -> dict[str, Any] | None:
        """What rank 0 reported, or None where the run was to be killed."""
        self._number += 1
        store, result = (self._folder / f"{name}{self._number}" for name in ("store", "result"))
        processes: list[BaseProcess] = [
            self._context.Process(target=main, args=(rank, run, checkpoints, store, result))
            for rank in range(run.world_size)
        ]
        for process in processes:
            process.start()
        exits = _wait(processes)
        if run.kill is None:
            assert exits == [0] * run.world_size, exits
            loaded: dict[str, Any] = torch.load(result, weights_only=True)
            return loaded
        killed = [exits[rank] for rank in run.kill.ranks]
        # The last of several to get there may find its peers gone, and fail of that first.
        assert -9 in killed, exits
        assert 0 not in killed, exits
        return None

    def trial(self, trial: Trial) -> str:
        """Kill, resume, compare; returns from where it was resumed.

        Raises:
            AssertionError: Something that must be equal is not.
        """
        checkpoints = self._folder / f"checkpoints{self._number}"
        self.run(trial.before, checkpoints)
        newest = newest_complete(checkpoints)
        expected_first = 0 if newest is None else int(newest.name.removeprefix("step-"))
        assert newest is None or expected_first % trial.before.save_every == 0
        kill = trial.before.kill
        assert kill is not None
        assert expected_first < kill.step + (kill.point not in ("in_save", "before_metadata"))
        folders = sorted(path.name for path in checkpoints.glob("step-*"))
        incomplete = [name for name in folders if not (checkpoints / name / ".metadata").exists()]
        found = self.run(trial.after, checkpoints)
        assert found is not None
        reference = self.reference(trial.after.replans, trial.after.objective)
        self._compare(found, expected_first, reference)
        phase = "the start" if newest is None else _phase(expected_first, trial.after.replans)
        return f"{phase}{', past an incomplete one' if incomplete else ''}"

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


def _phase(step: int, replans: bool) -> str:
    if step <= 4:
        return "the plan" if step == 4 else "the observation phase"
    if step < 7:
        return "the transition"
    if not replans or step == 7:
        return "the lock or later"
    return "the second plan" if step == 8 else "the second transition or later"


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
def campaign() -> Iterator[Campaign]:
    """A campaign in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        for name, value in (("OMP_NUM_THREADS", "1"), ("GLOO_SOCKET_IFNAME", "lo")):
            if name not in os.environ:
                os.environ[name] = value
                stack.callback(os.environ.pop, name)
        yield Campaign(Path(folder))


def run_trials(num_trials: int, seed: int, *, verbose: bool = False) -> Counter[str]:
    """Run trials; counts from where they were resumed.

    Raises:
        AssertionError: A trial failed; names it by seed and number.
    """
    counts: Counter[str] = Counter()
    with campaign() as runner:
        for number in range(num_trials):
            trial = draw(random.Random(f"{seed}/{number}"))
            try:
                outcome = runner.trial(trial)
            except AssertionError as error:
                raise AssertionError(f"trial {number} of seed {seed}: {trial}: {error}") from error
            counts[outcome] += 1
            if verbose:
                print(f"{number}: resumed from {outcome}; {trial}", flush=True)
    return counts
