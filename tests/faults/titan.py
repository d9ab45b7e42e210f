"""Trials through torchtitan: the ranks of a tiny llama are killed, started again and compared."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.faults.series import Trial as SeriesTrial
from tests.integration.titan_ranks import Job, Run, Server, assert_same_end, server

NUM_STEPS, PLAN_STEP = 10, 4
POINTS = ("SIGKILL", "SIGTERM", "in_save", "before_metadata")
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
class Trial:
    """A run that ends early, and the layout that goes on with it."""

    before: str
    after: str
    die_at: tuple[int, int, str]
    interval: int
    saves_async: bool

    def options(self) -> tuple[str, ...]:
        """How checkpoints are saved."""
        mode = "async" if self.saves_async else "disabled"
        return (f"--checkpoint.interval={self.interval}", f"--checkpoint.async_mode={mode}")


def draw(rng: random.Random) -> Trial:
    """A random trial; half of them go on with the same layout."""
    before, point, interval = rng.choice(list(LAYOUTS)), rng.choice(POINTS), rng.randint(1, 3)
    after = before if rng.random() < 0.5 else rng.choice(list(LAYOUTS))
    step = rng.randint(1, NUM_STEPS - 2)
    rank = rng.randrange(LAYOUTS[before][0])
    if point in ("in_save", "before_metadata"):
        step = -(-step // interval) * interval
    if point == "before_metadata":
        rank = 0  # the one that writes metadata
    return Trial(before, after, (rank, step, point), interval, rng.random() < 0.5)


class Campaign:
    """Runs trials in a folder; the undisturbed run of each layout is made once."""

    def __init__(self, titan: Server, folder: Path) -> None:
        self._titan, self._folder = titan, folder
        self._references: dict[str, Run] = {}
        self._number = 0

    def reference(self, layout: str) -> Run:
        """The run of a layout that nothing happens to."""
        if layout not in self._references:
            job = self._job(layout, self._folder / layout, ("--checkpoint.interval=100",))
            self._references[layout] = self._titan.run(job)
        return self._references[layout]

    def _job(self, layout: str, folder: Path, options: tuple[str, ...]) -> Job:
        world_size, more = LAYOUTS[layout]
        return Job(world_size, str(folder), (*OPTIONS, *more, *options))

    def trial(self, trial: Trial) -> str:
        """Stop, start again, compare; returns from which phase it went on.

        Raises:
            AssertionError: Something that must be equal is not.
        """
        self._number += 1
        folder = self._folder / f"trial{self._number}"
        job = self._job(trial.before, folder, trial.options())
        processes = self._titan.start(dataclasses.replace(job, die_at=trial.die_at))
        exits = self._titan.wait(processes, timeout=120)
        assert None not in exits, f"a rank hangs: {exits}"
        if trial.die_at[2] == "SIGTERM":
            assert set(exits) == {0}, exits
        else:
            assert exits[trial.die_at[0]] == -9, exits
        first = max(Run(folder, len(exits)).complete(), default=0)
        found = self._titan.run(self._job(trial.after, folder, trial.options()))
        assert found.traces()[0][0]["step"] == first + 1
        self._compare(trial, found, first)
        return _phase(first)

    def _compare(self, trial: Trial, found: Run, first: int) -> None:
        expected, after = self.reference(trial.before), self.reference(trial.after)
        if trial.before == trial.after:
            assert_same_end(found, after, NUM_STEPS)
        trace, reference = found.traces()[0], expected.traces()[0]
        restored = min(first, PLAN_STEP) // 2
        assert (
            trace[-1]["observations"][:restored] == reference[-1]["observations"][:restored]
        )  # of the world that observed
        if first >= PLAN_STEP:
            for record in trace:
                assert record["schedules"] == reference[record["step"] - 1]["schedules"]


def _phase(first: int) -> str:
    if first < PLAN_STEP:
        return "observation" if first else "start"
    return "plan" if first == PLAN_STEP else "transition" if first < 8 else "lock"


@contextlib.contextmanager
def trials() -> Iterator[SeriesTrial]:
    """Trials in a temporary folder."""
    with server() as titan, tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(titan, Path(folder))
        yield lambda rng: [campaign.trial(draw(rng))]
