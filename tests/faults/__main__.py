"""``python -m tests.faults --trials N --seed S --through dcp|torchtitan --results FILE``."""

from __future__ import annotations

import sys

from tests.faults import campaign, titan
from tests.faults.series import main

if __name__ == "__main__":
    through = {"dcp": campaign.trials, "torchtitan": titan.trials}
    sys.exit(main("tests.faults", "trials", through))
