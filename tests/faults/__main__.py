"""``python -m tests.faults --number N --seed S``."""

from __future__ import annotations

import sys

from tests.faults.campaign import Campaign
from tests.faults.series import main

if __name__ == "__main__":
    sys.exit(main(lambda ranks, folder: Campaign(ranks, folder).trial))
