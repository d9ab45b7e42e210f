"""The front door is light: commands that plan or watch must not wait for torchtitan."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_commands_import_neither_torchtitan_nor_the_extras() -> None:
    # Training patches torchtitan's view of the machine, which must be done before its first import.
    heavy = {"torchtitan", "matplotlib", "scipy", "transformers", "datasets", "lm_eval"}
    code = f"import sys, torchtitan_ext.cli; print(sorted({heavy!r} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["experiments", "list"], ["plan", "--ell", "attn_q=3e-4"], ["watch", "."]],
    ids=lambda arguments: arguments[0],
)
def test_a_reader_that_has_seen_enough_is_no_failure(arguments: list[str], tmp_path: Path) -> None:
    """As in ``amo plan ... | head``, whose pipe nobody reads any more."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "torchtitan_ext", *arguments],
            stdout=pipe,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    assert (done.returncode, done.stderr) == (0, "")
