"""Numbered trials, each drawn from a seed, of a campaign that may be stopped and go on."""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

Trial = Callable[[random.Random], list[str]]
"""Runs one trial; returns what happened in it.

Raises ``AssertionError`` where something that must be equal is not.
"""


def run_series(
    trial: Trial,
    numbers: Sequence[int],
    seed: int,
    results: Path | None = None,
    *,
    stop: bool = False,
) -> Counter[str]:
    """Run trials; counts what happened.

    Args:
        trial: Gets numbers that depend on the seed and the trial's own number alone.
        numbers: Which.
        seed: Of all of them.
        results: A file that gets a line of each trial; those that it has are not run again.
        stop: Whether to raise at the first failure. Else it is counted as ``DIFFERS``.

    Raises:
        AssertionError: A trial failed; names it by seed and number.
    """
    done = {number: done for number, done in _read(results, seed).items() if number in numbers}
    start, num_before, count = time.monotonic(), len(done), len(numbers)
    for number in numbers:
        if number in done:
            continue
        failure = ""
        try:
            done[number] = trial(random.Random(f"{seed}/{number}"))
        except Exception as error:
            failure = f"trial {number} of seed {seed}: {type(error).__name__}: {error}"
            if stop:
                raise AssertionError(failure) from error
            print(f"\n{failure}", flush=True)
            done[number] = ["DIFFERS"]
        if results is not None:
            record = {"seed": seed, "number": number, "events": done[number], "failure": failure}
            with results.open("a") as stream:
                stream.write(json.dumps(record) + "\n")
        if not stop:
            num_run = len(done) - num_before
            seconds = (time.monotonic() - start) / num_run
            left = (count - len(done)) * seconds / 60
            line = f"{len(done)} of {count}, {seconds:.1f} s each, {left:.0f} minutes left"
            if sys.stdout.isatty() or num_run % 10 == 0:
                print(line, end="\r" if sys.stdout.isatty() else "\n", flush=True)
    return Counter(event for number in numbers for event in done[number])


def _read(results: Path | None, seed: int) -> dict[int, list[str]]:
    if results is None or not results.exists():
        return {}
    records = [json.loads(line) for line in results.read_text().splitlines()]
    return {record["number"]: record["events"] for record in records if record["seed"] == seed}
