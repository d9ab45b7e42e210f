"""Parts of every benchmark: paired timing, description of the machine, tables and JSON.

Contenders take turns inside one process (A B C, A B C, ...), so that other load of the machine
falls on all of them alike. Ratios are taken within a round, and their median is reported.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.tables import markdown

RESULTS = Path(__file__).resolve().parent / "results"
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
"""Clocks by name; ``cpu`` counts this process alone, which on a busy machine is the steadier."""


def paired(
    contenders: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    clock: str = "wall",
    warmup: int = 1,
) -> dict[str, list[float]]:
    """Seconds of each contender by round."""
    now = CLOCKS[clock]
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(warmup + rounds):
        for name, run in contenders.items():
            synchronize()
            start = now()
            run()
            synchronize()
            if turn >= warmup:
                seconds[name].append(now() - start)
    return seconds


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def ratio(seconds: Mapping[str, Sequence[float]], name: str, reference: str) -> float:
    """Median over rounds of one contender's time over another's."""
    return statistics.median(
        own / other for own, other in zip(seconds[name], seconds[reference], strict=True)
    )


def machine() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].partition(":")[2].strip() if names else cpu
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _cell(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def report(
    name: str,
    rows: Sequence[Mapping[str, object]],
    output: Path | None,
    settings: Mapping[str, object] | None = None,
) -> None:
    """Print the table, and write it with machine and settings to ``results/<name>.json``.

    Numbers that are not finite become ``null`` in the file.
    """
    header = list(rows[0])
    print(markdown(header, [[_cell(row.get(key, "")) for key in header] for row in rows]))
    path = output or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "machine": machine(),
        "settings": dict(settings or {}),
        "rows": [{key: _json_number(value) for key, value in row.items()} for row in rows],
    }
    path.write_text(json.dumps(content, indent=1, default=str) + "\n")
    print(f"written to {path}", flush=True)


def _json_number(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
