"""``python -m tests.faults --trials N --seed S --results FILE``."""

from __future__ import annotations

import sys

from tests.faults import campaign
from tests.faults.series import main

if __name__ == "__main__":
    sys.exit(main("tests.faults", "trials", campaign.trials))
