"""A model that PyTorch really compiles, through AMO's lock."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.integration.processes import CPU, Command
from tests.integration.titan_ranks import CONFIG, OPTIONS
from torchtitan_ext.runs.run_files import read_metrics

ALONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "0",
    "COVERAGE_PROCESS_CONFIG": "",  # measured, tracing takes twice as long
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler for C++")
def test_a_compiled_model_trains_through_the_lock(tmp_path: Path) -> None:
    cache, folder = tmp_path / "cache", tmp_path / "run"
    options = ("--job.config_file", CONFIG, *OPTIONS, f"--dump_folder={folder}", "--compile.enable")
    words = [sys.executable, "-m", "torchtitan_ext.train", *options]
    Command(words, tmp_path, {**CPU, **ALONE, "TORCHINDUCTOR_CACHE_DIR": str(cache)}).end()
    assert list(cache.rglob("*.so")), "nothing was compiled"
    records = read_metrics(folder).steps
    assert [record["phase"] for record in records][-1] == "locked"
    assert records[-1]["loss"] < records[0]["loss"]
    # Names of compiled modules are those of plain ones: every type has its steps.
    assert len(records[-1]["num_steps_by_type"]) == 7
