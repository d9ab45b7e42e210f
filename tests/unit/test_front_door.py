"""The front door is light: commands that plan or watch must not wait for torchtitan."""

from __future__ import annotations

import subprocess
import sys


def test_the_commands_import_neither_torchtitan_nor_the_extras() -> None:
    # Training patches torchtitan's view of the machine, which must be done before its first import.
    heavy = {"torchtitan", "matplotlib", "scipy", "transformers", "datasets", "lm_eval"}
    code = f"import sys, torchtitan_ext.cli; print(sorted({heavy!r} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
