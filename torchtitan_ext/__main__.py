"""``python -m torchtitan_ext``: the same as ``amo``."""

from __future__ import annotations

import sys

from torchtitan_ext.cli import main

if __name__ == "__main__":
    sys.exit(main())
