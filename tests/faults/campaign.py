"""Trials through plain DCP: a run is killed, its checkpoints are damaged, it resumes elsewhere."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

from tests import runs
from tests.distributed.harness import Ranks
from tests.faults.damage import KINDS, SAVE_POINTS, Ledger
from tests.faults.worker import STEPS, Run, train


def draw(rng: random.Random) -> tuple[list[Run], list[list[str]]]:
    """Random runs over one folder of checkpoints; each but the last is killed.

    Returns:
        The runs in order, and the kinds of damage to the newest checkpoint after each.
    """
    drawn = []
    # At later steps each, so that most runs get to their end.
    for step in [*sorted(rng.sample(range(1, STEPS + 1), rng.randint(1, 3))), 0]:
        world_size, save_every = rng.randint(1, 4), rng.randint(1, 3)
        point, killed = "", tuple(range(world_size)) if step else ()
        if step:
            point = rng.choice(("before_step", "in_step", *SAVE_POINTS))
            if point in SAVE_POINTS:
                step = min(-(-step // save_every), STEPS // save_every) * save_every
            if point in ("before_metadata", "before_checksums"):
                killed = (0,)  # only the coordinator writes metadata; the others wait for it
            elif rng.random() < 0.5:
                killed = (rng.randrange(world_size),)
        middle = "hsdp" if world_size == 4 else "fsdp"
        layout = rng.choice(["plain", "fsdp", middle, "tp"] if world_size > 1 else ["plain"])
        drawn.append(Run(world_size, layout, save_every, rng.random() < 0.5, step, point, killed))
    return drawn, [rng.choices(KINDS, k=rng.choice((0, 1, 1, 2))) for _ in drawn]


class Campaign:
    """Runs trials on ranks that may die."""

    def __init__(self, run_on: Ranks, folder: Path) -> None:
        self._run_on, self._folder = run_on, folder
        self._reference: dict[str, Any] = {}

    def trial(self, rng: random.Random) -> list[str]:
        """Kills, damages, resumes, and compares in the end; returns the events.

        Raises:
            AssertionError: Something that must be equal is not.
        """
        trial_runs, damages = draw(rng)
        if not self._reference:  # an undisturbed run on one rank
            run = Run(1, "plain", STEPS + 1)
            (self._reference,) = self._run_on(1)(train, run, self._folder / "none")
        checkpoints, resumed = self._folder / "checkpoints", self._folder / "resumed.json"
        ledger, events = Ledger(checkpoints), ["resumes"] * (len(trial_runs) - 1)
        for run, kinds in zip(trial_runs, damages, strict=True):
            step, named = ledger.expected()
            outcomes = self._run_on(run.world_size, fresh=True)(train, run, checkpoints, resumed)
            resume = json.loads(resumed.read_text())
            resumed.unlink()
            assert resume["first"] == step, (resume, step)
            for later, names in named.items():
                text = "\n".join(resume["errors"][f"step-{later:04}"])
                assert any(name in text for name in names), (names, text)
                events.append("a damaged checkpoint named")
            if all(outcomes):  # the last one, or one past the step of its kill already
                assert run.kill_step <= step
                break
            assert run.killed
            assert not any(outcomes[rank] for rank in run.killed)
            events += filter(None, [ledger.harm(rng, kind) for kind in kinds])
        assert all(outcomes)
        outcome = outcomes[0]
        assert set(outcome["controls"]) == set(range(step, STEPS + 1))
        for after, control in outcome["controls"].items():
            assert not after or control == self._reference["controls"][after], after
        # Gradients are injected and a matrix is orthogonalized whole, so that no order of
        # reduction enters: not only the same world ends on the same bits.
        assert runs.equal(outcome["params"], self._reference["params"])
        shutil.rmtree(checkpoints, ignore_errors=True)
        return events
