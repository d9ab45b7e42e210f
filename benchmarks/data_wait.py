"""Seconds that a step waits for data, on ranks of this machine.

``python -m benchmarks.data_wait`` trains the debug model on packed tokens, those of the Python
standard library. ``--read-ms 5`` has each sequence take that much longer, as on a folder that
answers slowly, and compares batches read ahead with batches read in the step. The waits are those
of ``metrics.jsonl``: in each step those of its slowest rank, without the first steps, which start
everything up.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import report
from torchtitan_ext.data.loader import PackedLoader

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "debug_llama3.toml"
START = 10
"""Steps left out."""


class Ahead(PackedLoader):
    """Stand-in for a folder that answers slowly, read ahead as ever."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(PackedLoader.Config):
        pass

    def __init__(self, config: Any, **options: Any) -> None:
        super().__init__(dataclasses.replace(config, dataset="stdlib"), **options)

    def _tokens(self, number: int) -> Any:
        time.sleep(float(os.environ["READ_MS"]) / 1e3)
        return super()._tokens(number)


class InStep(Ahead):
    """The same, read by the step that needs it."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(PackedLoader.Config):
        pass

    def __iter__(self) -> Iterator[Any]:
        for batch, number in self._read(self._next):
            self._next = number
            yield batch


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data_wait", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--read-ms", type=float, default=0.0, help="by which a sequence is slower")
    parser.add_argument("--output", type=Path, help="JSON")
    options = parser.parse_args(args)
    rows = [measured(options, loader) for loader in (Ahead, InStep)]
    report("data_wait", rows, options.output, vars(options))
    return 0


def measured(options: argparse.Namespace, loader: type[PackedLoader]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "run")
        command = [
            *(sys.executable, "-m", "torchtitan_ext", "train", str(CONFIG)),
            *("--ranks", str(options.ranks), f"--training.steps={options.steps}"),
            *("--optimizer.name=Muon", f"--dump_folder={folder}"),
            f"--dataloader.dataset=benchmarks.data_wait.{loader.__name__}",
        ]
        environment = {"OMP_NUM_THREADS": "1", "AMO_DEVICE": "cpu", **os.environ}
        environment["READ_MS"] = str(options.read_ms)
        subprocess.run(command, env=environment, cwd=ROOT, check=True)
        lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines][START:]
    waits = [record["data_seconds_per_step"] for record in records]
    seconds = [record["seconds_per_step"] for record in records]
    return {
        "batches": {"Ahead": "read ahead", "InStep": "read in the step"}[loader.__name__],
        "step, ms": 1e3 * statistics.mean(seconds),
        "waits for data, ms": 1e3 * statistics.mean(waits),
        "waits, %": 100 * sum(waits) / sum(seconds),
        "longest wait, ms": 1e3 * max(waits),
    }


if __name__ == "__main__":
    sys.exit(main())
