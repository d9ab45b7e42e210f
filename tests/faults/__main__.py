"""``python -m tests.faults --trials N --seed S --through dcp|torchtitan``."""

from __future__ import annotations

import argparse
import time

from tests.faults import campaign, titan


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--through", choices=("dcp", "torchtitan"), default="dcp")
    arguments = parser.parse_args()
    start = time.monotonic()
    run_trials = {"dcp": campaign.run_trials, "torchtitan": titan.run_trials}[arguments.through]
    counts = run_trials(arguments.trials, arguments.seed, verbose=True)
    print(f"{arguments.trials} trials passed in {time.monotonic() - start:.0f} s; resumed from")
    for outcome, count in sorted(counts.items()):
        print(f"  {outcome}: {count}")


if __name__ == "__main__":
    main()
