"""``python -m tests.fuzz --cases N --seed S --results FILE``."""

from __future__ import annotations

import sys

from tests.faults.series import main
from tests.fuzz.cases import cases

if __name__ == "__main__":
    sys.exit(main("tests.fuzz", "cases", cases))
