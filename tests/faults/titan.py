"""Trials through torchtitan: a tiny llama is killed, its checkpoints are damaged, it goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.faults.damage import KINDS, Ledger, names_one
from tests.faults.series import Trial as SeriesTrial
from tests.integration.titan_ranks import Job, Run, Server, assert_same_end, server

NUM_STEPS, PLAN_STEP = 10, 4
POINTS = ("SIGKILL", "SIGTERM", "in_save", "before_metadata")
PLANNERS = ("measured", "paper")
TIMEOUT = 300.0
OPTIONS = (
    *("--checkpoint.enable", "--checkpoint.keep_latest_k=0"),
    "--checkpoint.no-last_save_model_only",
)
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "fsdp1": (1, ()),
    "fsdp2": (2, ()),
    "fsdp4": (4, ()),
    "hsdp": (4, ("--parallelism.data_parallel_replicate_degree=2",)),
    "ddp": (
        2,
        (
            "--parallelism.data_parallel_replicate_degree=2",
            "--parallelism.data_parallel_shard_degree=1",
        ),
    ),
    "tp": (4, ("--parallelism.tensor_parallel_degree=2",)),
}


@dataclasses.dataclass(frozen=True)
class Leg:
    """One run of a trial.

    Attributes:
        layout: One of `LAYOUTS`.
        interval: Steps from one checkpoint to the next.
        saves_async: Whether a checkpoint is written while training goes on.
        die_at: Where it ends early, if it does; see `Job`.
    """

    layout: str
    interval: int
    saves_async: bool
    die_at: tuple[int, int, str] | None = None


@dataclasses.dataclass(frozen=True)
class Trial:
    """Legs over one folder; each but the last ends early.

    Attributes:
        legs: What they do.
        damages: After each of them but the last, how the newest checkpoint is damaged.
        planner: What plans minimise.
        asks: Whether a resume is first told to stop at damaged checkpoints.
    """

    legs: tuple[Leg, ...]
    damages: tuple[tuple[str, ...], ...]
    planner: str
    asks: bool


def draw(rng: random.Random) -> Trial:
    """A random trial; half of them go on with the same layout."""
    num_kills, layout = rng.randint(1, 2), rng.choice(list(LAYOUTS))
    stays = rng.random() < 0.5
    legs = []
    for step in [*sorted(rng.sample(range(1, NUM_STEPS - 1), num_kills)), None]:
        interval, saves_async = rng.randint(1, 3), rng.random() < 0.5
        die_at = None
        if step is not None:
            point, rank = rng.choice(POINTS), rng.randrange(LAYOUTS[layout][0])
            if point in ("in_save", "before_metadata"):
                step = min(-(-step // interval) * interval, NUM_STEPS)
            # The first rank is the one that writes metadata.
            die_at = (0 if point == "before_metadata" else rank, step, point)
        legs.append(Leg(layout, interval, saves_async, die_at))
        layout = layout if stays else rng.choice(list(LAYOUTS))
    damages = [tuple(rng.choices(KINDS, k=rng.choice((0, 1, 1, 2)))) for _ in range(num_kills)]
    return Trial(tuple(legs), tuple(damages), rng.choice(PLANNERS), rng.random() < 0.3)


class Campaign:
    """Runs trials in a folder; the undisturbed run of each layout is made once."""

    def __init__(self, titan: Server, folder: Path) -> None:
        self._titan, self._folder = titan, folder
        self._references: dict[tuple[str, str], Run] = {}
        self._number = 0

    def reference(self, layout: str, planner: str) -> Run:
        """The run of a layout that nothing happens to."""
        key = layout, planner
        if key not in self._references:
            leg = Leg(layout, 100, False)
            job = self._job(leg, self._folder / f"{layout}-{planner}", planner)
            self._references[key] = self._titan.run(job)
        return self._references[key]

    def _job(self, leg: Leg, folder: Path, planner: str) -> Job:
        world_size, more = LAYOUTS[leg.layout]
        options = (
            f"--checkpoint.interval={leg.interval}",
            f"--checkpoint.async_mode={'async' if leg.saves_async else 'disabled'}",
            f"--optimizer.amo.planner={planner}",
        )
        return Job(world_size, str(folder), (*OPTIONS, *more, *options), die_at=leg.die_at)

    def _run(self, job: Job) -> tuple[list[int | None], str]:
        """Exits by rank, and what the ranks said."""
        run = Run(Path(job.folder), job.world_size)
        for path in run.folder.glob("rank*.txt"):
            path.unlink()
        exits = self._titan.wait(self._titan.start(job), timeout=TIMEOUT)
        return exits, run.output()

    def trial(self, trial: Trial, rng: random.Random) -> list[str]:
        """Stop, damage, start again, compare; returns what happened.

        Raises:
            AssertionError: Something that must be equal is not.
        """
        self._number += 1
        folder = self._folder / f"trial{self._number}"
        ledger, events = Ledger(folder / "checkpoint"), [f"resumes: {len(trial.damages)}"]
        layouts: dict[int, str] = {}  # of the world that took each step
        for leg, damages in zip(trial.legs, (*trial.damages, ()), strict=True):
            job = self._job(leg, folder, trial.planner)
            exits, text, first = self._go_on(job, ledger, trial.asks, events)
            layouts |= dict.fromkeys(range(first + 1, NUM_STEPS + 1), leg.layout)
            if leg is not trial.legs[0]:
                events.append(f"resumed from {_phase(first)}")
            ledger.look()
            if NUM_STEPS in ledger.complete():
                break  # the last one, or one past the step of its end already
            assert leg.die_at is not None, text
            if leg.die_at[2] == "SIGTERM":
                assert set(exits) == {0}, (exits, text)
            else:
                assert exits[leg.die_at[0]] == -9, (exits, text)
            events += filter(None, [ledger.harm(rng, kind) for kind in damages])
        assert set(exits) == {0}, (exits, text)
        self._compare(Run(folder, job.world_size), first, layouts, trial.planner)
        shutil.rmtree(folder)
        return events

    def _go_on(
        self, job: Job, ledger: Ledger, asks: bool, events: list[str]
    ) -> tuple[list[int | None], str, int]:
        """Exits, what was said, and the step that the run went on from."""
        expected, incomplete = ledger.expected(), ledger.incomplete()
        newest = max((*expected.steps, *expected.damaged))
        if asks and newest in expected.damaged:
            stop = (*job.arguments, "--checkpoint.damaged=error")
            exits, text = self._run(dataclasses.replace(job, arguments=stop, die_at=None))
            assert set(exits) == {2}, (exits, text)
            assert names_one(expected.damaged[newest], _damage_told(text, newest)), text
            events.append("stopped where told to")
        exits, text = self._run(job)
        if set(exits) == {2} and 0 in expected.steps:
            assert "no checkpoint before it can be read" in text, text
            events.append("stopped where all were damaged")
            shutil.rmtree(Path(job.folder, "checkpoint"))
            ledger.look()
            exits, text = self._run(job)
            expected = dataclasses.replace(expected, steps={0})
        found = re.search(r"training resumes at step (\d+)", text)
        first = int(found[1]) - 1 if found else 0
        assert found or "training starts anew" in text, (exits, text)
        assert first in expected.steps, (first, expected, text)
        for step, names in expected.damaged.items():
            if step > first > 0:
                assert names_one(names, _damage_told(text, step)), (names, text)
                events.append("a damaged checkpoint named")
        if any(step > first for step in incomplete):
            events.append("resumed past an incomplete checkpoint")
        return exits, text, first

    def _compare(self, found: Run, first: int, layouts: dict[int, str], planner: str) -> None:
        if len(set(layouts.values())) == 1:
            assert_same_end(found, self.reference(layouts[1], planner), NUM_STEPS)
        restored = min(first, PLAN_STEP)
        observed = {layouts[step] for step in range(1, restored + 1)}
        if len(observed) != 1:
            return  # by no world that has a reference
        trace = found.traces()[0]
        reference = self.reference(observed.pop(), planner).traces()[0]
        count = restored // 2
        assert trace[-1]["observations"][:count] == reference[-1]["observations"][:count]
        if first >= PLAN_STEP:
            for record in trace:
                assert record["schedules"] == reference[record["step"] - 1]["schedules"]


def _damage_told(text: str, step: int) -> str:
    lines = [line for line in text.splitlines() if f"step-{step} is damaged: " in line]
    return "\n".join(line.split("is damaged: ", 1)[1] for line in lines)


def _phase(first: int) -> str:
    if first < PLAN_STEP:
        return "the observation phase" if first else "the start"
    return "the plan" if first == PLAN_STEP else "the transition" if first < 8 else "the lock"


@contextlib.contextmanager
def trials() -> Iterator[SeriesTrial]:
    """Trials in a temporary folder."""
    with server() as titan, tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(titan, Path(folder))
        yield lambda rng: campaign.trial(draw(rng), rng)
