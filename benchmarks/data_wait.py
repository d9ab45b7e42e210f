"""Seconds that a step waits for data, on ranks of this machine.

``python -m benchmarks.data_wait`` trains the debug model on packed tokens, those of the Python
standard library. The waits are those of ``metrics.jsonl``: in each step those of its slowest rank,
without the first steps, which start everything up.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure import report

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "debug_llama3.toml"
START = 10
"""Steps left out."""


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data_wait", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--output", type=Path, help="JSON")
    options = parser.parse_args(args)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "run")
        command = [
            *(sys.executable, "-m", "torchtitan_ext", "train", str(CONFIG)),
            *("--ranks", str(options.ranks), f"--training.steps={options.steps}"),
            *("--optimizer.name=Muon", f"--dump_folder={folder}"),
        ]
        environment = {"OMP_NUM_THREADS": "1", "AMO_DEVICE": "cpu", **os.environ}
        subprocess.run(command, env=environment, cwd=ROOT, check=True)
        lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines][START:]
    waits = [record["data_seconds_per_step"] for record in records]
    seconds = [record["seconds_per_step"] for record in records]
    row = {
        "step, ms": 1e3 * statistics.mean(seconds),
        "waits for data, ms": 1e3 * statistics.mean(waits),
        "waits, %": 100 * sum(waits) / sum(seconds),
        "longest wait, ms": 1e3 * max(waits),
    }
    report("data_wait", [row], options.output, vars(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
