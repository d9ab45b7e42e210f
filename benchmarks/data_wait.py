"""Seconds that a step waits for data, with and without reading ahead, on ranks of this machine.

``python -m benchmarks.data_wait`` trains the debug model on JSON lines from a reader that is slowed
on purpose: each row takes ``--row-ms``, and so a refill of ``--shuffle-buffer`` rows by each stream
stops training that reads in its own process. The waits are those of ``metrics.jsonl``: in each step
those of its slowest rank, without the first steps, which start everything up.
"""

from __future__ import annotations

import argparse
import contextlib
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

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "debug_llama3.toml"
START = 10
"""Steps left out."""
RANK = "rank"
"""First argument of the processes that train."""


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data_wait", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--row-ms", type=float, default=5.0, help="how long a row takes to read")
    parser.add_argument("--shuffle-buffer", type=int, default=20)
    parser.add_argument("--output", type=Path, help="JSON")
    options = parser.parse_args(args)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        corpus = write_corpus(Path(folder, "corpus"))
        for num_workers in (0, 1):
            rows.append(run(options, corpus, Path(folder, f"workers_{num_workers}"), num_workers))
    report("data_wait", rows, options.output, vars(options))
    same = rows[0]["last loss"] == rows[1]["last loss"]
    print(f"reading ahead changes no loss: {'true' if same else 'FALSE'}")
    return 0 if same else 1


def write_corpus(folder: Path) -> Path:
    """Sixteen files of 500 lines of about 200 bytes; eight streams read two each."""
    folder.mkdir()
    for number in range(16):
        texts = (f"{number} {line} " * (10 + (7 * line + number) % 20) for line in range(500))
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{number:02}.jsonl").write_text(lines)
    return folder


def run(
    options: argparse.Namespace, corpus: Path, folder: Path, num_workers: int
) -> dict[str, Any]:
    """Train, and read the waits."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(options.ranks), "-m", "benchmarks.data_wait"),
        *(RANK, str(options.row_ms / 1e3), f"--job.config_file={CONFIG}"),
        *("--training.dataset=documents", f"--training.dataset_path={corpus}"),
        f"--data.shuffle_buffer={options.shuffle_buffer}",
        f"--data.num_workers={num_workers}",
        f"--training.steps={options.steps}",
        f"--dump_folder={folder}",
    ]
    environment = {"OMP_NUM_THREADS": "1", "AMO_DEVICE": "cpu", **os.environ}
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"num_workers {num_workers}: {done.stderr[-2000:]}")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    waits = [record["data_seconds_per_step"] for record in records[START:]]
    seconds = [record["seconds_per_step"] for record in records[START:]]
    return {
        "num_workers": num_workers,
        "step, ms": 1e3 * statistics.mean(seconds),
        "waits for data, ms": 1e3 * statistics.mean(waits),
        "waits, %": 100 * sum(waits) / sum(seconds),
        "longest wait, ms": 1e3 * max(waits),
        "last loss": records[-1]["loss"],
    }


def rank(seconds: float, arguments: Sequence[str]) -> int:
    """Train on this rank with a reader that takes ``seconds`` for a row."""
    from torchtitan_ext import train
    from torchtitan_ext.data import rows

    read_rows = rows.read_rows

    def slow(*args: Any) -> Iterator[Any]:
        with contextlib.closing(read_rows(*args)) as found:
            for row in found:
                time.sleep(seconds)
                yield row

    rows.read_rows = slow
    return train.main(arguments)


if __name__ == "__main__":
    is_rank = sys.argv[1:2] == [RANK]
    sys.exit(rank(float(sys.argv[2]), sys.argv[3:]) if is_rank else main())
