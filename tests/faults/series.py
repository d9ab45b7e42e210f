"""Numbered trials, each drawn from a seed, of a campaign that may be stopped and go on."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

DIFFERS = "DIFFERS"
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
    command: str = "",
    stop: bool = False,
) -> Counter[str]:
    """Run trials; counts what happened.

    Args:
        trial: Gets numbers that depend on the seed and the trial's own number alone.
        numbers: Which.
        seed: Of all of them.
        results: A file that gets a line of each trial; those that it has are not run again.
        command: To which ``--seed`` and ``--only`` are added to run one that failed again.
        stop: Whether to raise at the first failure. Else it is counted as `DIFFERS`.

    Raises:
        AssertionError: A trial failed; says how to run it again.
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
            again = f"{command} --seed {seed} --only {number}".strip()
            failure = f"{again}: {type(error).__name__}: {error}"
            if stop:
                raise AssertionError(failure) from error
            print(f"\n{failure}", flush=True)
            done[number] = [DIFFERS]
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


def main(module: str, noun: str, trials: Callable[[], AbstractContextManager[Trial]]) -> int:
    """A command line of a series.

    Args:
        module: As ``python -m`` runs it.
        noun: What is counted; its option gives their number.
        trials: What they run in.

    Returns:
        1 where one failed.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument(f"--{noun}", dest="count", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="one, by its number")
    parser.add_argument("--results", type=Path, help="a file of JSON lines; what it has is done")
    options = parser.parse_args()
    numbers = range(options.count) if options.only is None else [options.only]
    start = time.monotonic()
    with trials() as trial:
        command = f"python -m {module}"
        counts = run_series(trial, numbers, options.seed, options.results, command=command)
    failed = counts[DIFFERS]
    print(f"\n{len(numbers)} {noun} in {time.monotonic() - start:.0f} s, {failed} differ")
    for event, count in sorted(counts.items()):
        print(f"  {event}: {count}")
    return int(failed > 0)
