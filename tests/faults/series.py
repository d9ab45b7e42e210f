"""Numbered trials, each drawn from a seed and its number alone."""

from __future__ import annotations

import argparse
import contextlib
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.distributed.harness import Ranks

Trial = Callable[[random.Random], list[str]]
"""Runs one trial; returns its events.

Raises ``AssertionError`` where something that must be equal is not.
"""


def run_series(trial: Trial, numbers: Sequence[int], seed: int) -> Counter[str]:
    """Run trials; counts their events.

    Raises:
        AssertionError: A trial failed; says how to run it again.
    """
    events: Counter[str] = Counter()
    for number in numbers:
        try:
            events.update(trial(random.Random(f"{seed}/{number}")))
        except Exception as error:
            raise AssertionError(f"--seed {seed} --only {number}: {error!r}") from error
    return events


def main(make_trial: Callable[[Ranks, Path], Trial]) -> int:
    """The command line of a series; 1 where a trial failed."""
    parser = argparse.ArgumentParser(description="Trials that are drawn at random.")
    parser.add_argument("--number", type=int, default=10, help="trials to run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="one trial, by its number")
    options = parser.parse_args()
    numbers = range(options.number) if options.only is None else [options.only]
    start, failures = time.monotonic(), 0
    events: Counter[str] = Counter()
    with contextlib.closing(Ranks()) as ranks, tempfile.TemporaryDirectory() as folder:
        trial = make_trial(ranks, Path(folder))
        for number in numbers:
            events["trials"] += 1
            try:
                events += run_series(trial, [number], options.seed)
            except AssertionError as error:
                failures += 1
                print(error, flush=True)
    print(f"{time.monotonic() - start:.0f} s, {failures} failed")
    for event, count in sorted(events.items()):
        print(f"  {event}: {count}")
    return int(failures > 0)
