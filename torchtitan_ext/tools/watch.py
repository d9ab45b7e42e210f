"""``amo watch``: a run's progress in a terminal, from the metrics that it writes."""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from amo_dist.config import sort_operator_types
from amo_dist.tools.command import Subparsers, positive, printable
from torchtitan_ext.plugin.console import duration
from torchtitan_ext.runs import costs
from torchtitan_ext.runs.run_files import Metrics, MetricsReader

Record = Mapping[str, Any]

_CLEAR = "\x1b[H\x1b[J"
_BLOCKS = " ▁▂▃▄▅▆▇█"
_MOST_SECONDS = 86_400.0


def add_command(subparsers: Subparsers) -> None:
    """Register ``watch``."""
    parser = subparsers.add_parser(
        "watch",
        help="follow a run in a terminal",
        description="Show phase, progress to the lock, schedules, loss and time to go of a run. On "
        "a terminal the view is refreshed in place until the run is complete or Ctrl-C; elsewhere "
        "it is printed once.",
    )
    parser.add_argument("run_folder", metavar="RUN", help="dump folder of a run")
    parser.add_argument(
        "--follow", action="store_true", help="keep printing where there is no terminal"
    )
    parser.add_argument(
        "--interval",
        type=positive(_MOST_SECONDS),
        default=2.0,
        help="seconds between views (default %(default)s)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show the run of parsed arguments.

    Raises:
        ValueError: There is no such folder, or a file is malformed.
    """
    folder = Path(args.run_folder)
    if not folder.is_dir():
        raise ValueError(f"RUN: found no folder {folder}, expected the dump folder of a run")
    try:
        _show(folder, sys.stdout, follows=args.follow, interval=args.interval)
    except KeyboardInterrupt:
        print()
    return 0


def _show(folder: Path, out: TextIO, *, follows: bool, interval: float) -> None:
    in_place = out.isatty() and os.environ.get("TERM") != "dumb"
    reader, shown = MetricsReader(folder), 0
    while True:
        metrics = reader.read()
        records = metrics.steps
        step = records[-1]["step"] if records else 0
        if in_place or step != shown or shown == 0:
            width = shutil.get_terminal_size().columns if in_place else 80
            lines = view(folder.resolve().name, metrics, width=width)
            out.write((_CLEAR if in_place else "") + "\n".join(lines) + "\n")
            out.flush()
        shown = step
        if is_complete(records) or not (in_place or follows):
            return
        time.sleep(interval)


def is_complete(records: Sequence[Record]) -> bool:
    """Whether the last step of the run is logged."""
    return bool(records) and records[-1]["step"] >= (records[-1].get("training_steps") or math.inf)


def view(name: str, metrics: Metrics, *, width: int = 80) -> list[str]:
    """The lines to show.

    Args:
        name: Name of the run.
        metrics: Metrics of the run.
        width: Columns; longer lines are cut.
    """
    records = metrics.steps
    if not records:
        return [printable(f"{name}: no step is logged yet", keep="")]
    last = records[-1]
    lines = [_title(name, last), "", *_progress(records, min(width, 80)), ""]
    if last.get("loss") is not None:
        lines.append(_loss_line(records))
    if metrics.validations:
        step, loss = metrics.validations[-1]
        lines.append(f"validation  {loss:.4f}  after step {step:,}")
    lines += _optimizer_line(last)
    speed = _recent(records, "tokens_per_second")
    seconds = _recent(records, "seconds_per_step")
    if speed is not None and seconds:
        parts = {
            "optimizer": _recent(records, costs.OPTIMIZER_SECONDS),
            "data": costs.mean_of(records[-11:], "data_seconds_per_step"),  # waits are rare
        }
        shares = "".join(f"  {k} {v / seconds:.1%}" for k, v in parts.items() if v is not None)
        lines.append(f"speed       {speed:,.0f} tokens/s  {seconds * 1e3:,.0f} ms a step{shares}")
    if (tflops := _recent(records, "tflops")) is not None:
        mfu = _recent(records, "mfu_percent")
        share = "" if mfu is None else f"  {mfu:.1f}% of its peak (MFU)"
        lines.append(f"a device    {tflops:,.3g} TFLOP/s{share}")
    if last.get("peak_memory_bytes"):
        lines.append(f"memory      {last['peak_memory_bytes'] / 2**20:,.0f} MiB at most")
    if last["num_steps_by_type"]:
        lines += ["", *_table(records)]
    return [printable(line, keep="")[:width].rstrip() for line in lines]


def _title(name: str, last: Record) -> str:
    phase = f"  phase: {last['phase']}" if last["phase"] else ""
    skipped = int(last["optimizer"].get("optimizer/steps_skipped") or 0)
    return f"{name}{phase}{f'  {skipped} steps skipped' if skipped else ''}"


def _progress(records: Sequence[Record], width: int) -> list[str]:
    last = records[-1]
    step, steps, lock = last["step"], last.get("training_steps"), last.get("lock_step")
    seconds = _recent(records, "seconds_per_step")
    lines = []
    if steps:
        lines.append(_bar("training", step, steps, seconds, width))
    else:
        lines.append(f"training    step {step:,}")
    if lock:
        lines.append(_bar("to the lock", step, lock, seconds, width))
    return lines


def _bar(title: str, step: int, steps: int, seconds: float | None, width: int) -> str:
    step = min(step, steps)
    if step == steps:
        eta = "done"
    else:
        eta = "" if seconds is None else f"{duration((steps - step) * seconds)} to go"
    size = max(width - 50, 10)
    full = size * step // steps
    count = f"{step:,}/{steps:,}"
    return f"{title:<12}[{'#' * full}{'.' * (size - full)}] {count:<15} {eta}"


def _recent(records: Sequence[Record], key: str) -> float | None:
    """Median of the last ten records: one slow step, such as a checkpoint's, does not count."""
    return costs.median(costs.values(records[-10:], key))


def _loss_line(records: Sequence[Record]) -> str:
    values = costs.values(records, "loss")
    norm = records[-1].get("grad_norm")
    tail = "" if norm is None else f"  gradient norm {norm:.3g}"
    return f"loss        {values[-1]:.4f}  {sparkline(values[-400:], 24)}{tail}"


def _optimizer_line(last: Record) -> list[str]:
    rate, residual = last.get("lr"), last["optimizer"].get("newton_schulz/residual")
    guard = f"  residual of the guard {residual:.3g}" if residual else ""  # 0: none is measured yet
    return [] if rate is None else [f"rate        {rate:.3g}{guard}"]


def sparkline(values: Sequence[float], width: int) -> str:
    """A line of blocks, low to high; as many values share a block as are needed."""
    size = max(math.ceil(len(values) / width), 1)
    means = [statistics.fmean(values[i : i + size]) for i in range(0, len(values), size)]
    low, high = min(means), max(means)
    scale = (len(_BLOCKS) - 2) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[1 + round((mean - low) * scale)] for mean in means)


def _table(records: Sequence[Record]) -> list[str]:
    """NS steps of each type; for AMO the latest observed ell, and what the plan is composed for."""
    last = records[-1]
    figures, counts = last["optimizer"], last["num_steps_by_type"]
    observes = any(key.startswith("amo/ell/") for key in figures)
    has_plan = observes and last["phase"] in ("transition", "locked")
    header = f"{'type':<12}{'NS steps':>9}"
    if observes:
        header += (
            f"{'observed ell':>15}{'composed for':>15}" if has_plan else f"{'observed ell':>15}"
        )
    lines = [header]
    for name in sort_operator_types(counts):
        line = f"{name:<12}{counts[name]:>9}"
        for key in ("ell", "ell_target")[: 1 + has_plan] if observes else ():
            value = figures.get(f"amo/{key}/{name}")
            line += f"{'-' if value is None else format(value, '.2e'):>15}"
        lines.append(line)
    lines.append(f"{'total':<12}{sum(counts.values()):>9}")
    return lines
