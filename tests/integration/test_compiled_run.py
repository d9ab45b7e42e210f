"""A model that PyTorch really compiles, through AMO's lock."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.titan_ranks import CONFIG, OPTIONS, ROOT
from torchtitan_ext.runs.run_files import read_metrics


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler for C++")
def test_a_compiled_model_trains_through_the_lock(tmp_path: Path) -> None:
    cache, folder = tmp_path / "cache", tmp_path / "run"
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    alone |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    environment = {**os.environ, **alone, "AMO_DEVICE": "cpu", "PYTHONPATH": str(ROOT)}
    environment["COVERAGE_PROCESS_CONFIG"] = ""  # measured, tracing takes twice as long
    environment |= {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    options = ("--job.config_file", CONFIG, *OPTIONS, f"--dump_folder={folder}", "--compile.enable")
    done = subprocess.run(
        [sys.executable, "-m", "torchtitan_ext.train", *options],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert list(cache.rglob("*.so")), "nothing was compiled"
    records = read_metrics(folder).steps
    assert [record["phase"] for record in records][-1] == "locked"
    assert records[-1]["loss"] < records[0]["loss"]
    # Names of compiled modules are those of plain ones: every type is told.
    assert len(records[-1]["num_steps_by_type"]) == 7
