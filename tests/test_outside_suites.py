"""Other people's demands on an optimizer: the database of PyTorch's own tests."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.examples import ROOT


@pytest.mark.slow
def test_pytorchs_contract_holds_for_every_class() -> None:
    pytest.importorskip("expecttest", reason="PyTorch's test helpers import expecttest")
    # PyTorch's helpers freeze flags of the process that imports them.
    command = [sys.executable, "-m", "tests.torch_contract", "--json"]
    ran = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    records = json.loads(ran.stdout.splitlines()[-1])
    assert [record for record in records if record[2] == "failed"] == []
    assert all(reason for *_, result, reason in records if result == "skipped")
