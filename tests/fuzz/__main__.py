"""``python -m tests.fuzz --number N --seed S``."""

from __future__ import annotations

import sys

from tests.distributed.harness import compute_in_float32
from tests.faults.series import main
from tests.fuzz.cases import trial

if __name__ == "__main__":
    compute_in_float32()  # as the ranks do
    sys.exit(main(lambda ranks, _: lambda rng: trial(rng, ranks)))
