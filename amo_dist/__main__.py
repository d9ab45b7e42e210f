"""Entry point of ``python -m amo_dist``."""

from __future__ import annotations

from amo_dist.tools.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
