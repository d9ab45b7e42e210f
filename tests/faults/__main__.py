"""``python -m tests.faults --trials N --seed S --through dcp|torchtitan --results FILE``."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.faults import campaign, titan
from tests.faults.series import run_series


def main() -> int:
    """Run trials; returns 1 where one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="one trial, by its number")
    parser.add_argument("--through", choices=("dcp", "torchtitan"), default="dcp")
    parser.add_argument("--results", type=Path, help="a file of JSON lines; trials in it are done")
    arguments = parser.parse_args()
    start, only = time.monotonic(), arguments.only
    numbers = range(arguments.trials) if only is None else [only]
    trials = {"dcp": campaign.trials, "torchtitan": titan.trials}[arguments.through]
    with trials() as trial:
        counts = run_series(trial, numbers, arguments.seed, arguments.results)
    failed = counts["DIFFERS"]
    print(f"\n{len(numbers)} trials in {time.monotonic() - start:.0f} s, {failed} differ")
    for event, count in sorted(counts.items()):
        print(f"  {event}: {count}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
