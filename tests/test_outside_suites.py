"""Other people's demands on an optimizer: the database of PyTorch's own tests."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.examples import ROOT


@pytest.mark.slow
def test_pytorchs_contract_holds_for_every_class() -> None:
    pytest.importorskip("expecttest", reason="PyTorch's test helpers import expecttest")
    # PyTorch's helpers freeze flags of the process that imports them.
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "tests/torch_contract.py"]
    ran = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout
