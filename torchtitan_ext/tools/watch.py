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
        description="Show phase, loss, schedules and remaining time of a run, and the steps until "
        "AMO locks its plan. On a terminal the view is refreshed in place until the run is "
        "complete or you press Ctrl-C. Into a file or pipe it is printed once.",
    )
    parser.add_argument("run_folder", metavar="RUN", help="dump folder of a run")
    parser.add_argument(
        "--follow", action="store_true", help="keep printing, also into a file or pipe"
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
    reader, last_step = MetricsReader(folder), -1
    while True:
        metrics = reader.read()
        last = metrics.steps[-1] if metrics.steps else {"step": 0}
        if in_place or last["step"] != last_step:
            width = shutil.get_terminal_size().columns if in_place else 80
            lines = view(folder.resolve().name, metrics, width=width)
            out.write((_CLEAR if in_place else "") + "\n".join(lines) + "\n")
            out.flush()
        last_step = last["step"]
        is_complete = last_step >= (last.get("training_steps") or math.inf)
        if is_complete or not (in_place or follows):
            return
        time.sleep(interval)


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
    last, bar_width = records[-1], min(width, 80)
    figures, seconds = last["optimizer"], _recent(records, "seconds_per_step")
    title = name + (f"  phase: {last['phase']}" if last["phase"] else "")
    if skipped := int(figures.get("optimizer/steps_skipped") or 0):
        title += f"  {skipped} steps skipped"
    lines = [title, ""]

    def add(label: str, value: float | None, form: str, *more: str) -> None:
        if value is not None:
            lines.append("  ".join([f"{label:<12}{value:{form}}", *filter(None, more)]))

    if last.get("training_steps"):
        lines.append(_bar("training", last["step"], last["training_steps"], seconds, bar_width))
    else:
        add("training", last["step"], ",", "steps")
    if last.get("lock_step"):
        lines.append(_bar("plan locks", last["step"], last["lock_step"], seconds, bar_width))
    lines.append("")
    losses, norm = costs.values(records[-400:], "loss"), last.get("grad_norm")
    norm_text = "" if norm is None else f"gradient norm {norm:.3g}"
    add("loss", last.get("loss"), ".4f", sparkline(losses, 24), norm_text)
    step, loss = metrics.validations[-1] if metrics.validations else (0, None)
    add("validation", loss, ".4f", f"after step {step:,}")
    residual = figures.get("newton_schulz/residual")  # 0 before the first measurement
    add("rate", last.get("lr"), ".3g", f"residual of the guard {residual:.3g}" if residual else "")
    if seconds:
        seconds_by_part = {
            "optimizer": _recent(records, costs.OPTIMIZER_SECONDS),
            # Waits for data are rare: a median would hide them.
            "data": costs.mean_of(records[-11:], "data_seconds_per_step"),
        }
        shares = (f"{k} {v / seconds:.1%}" for k, v in seconds_by_part.items() if v is not None)
        speed = _recent(records, "tokens_per_second")
        add("tokens/s", speed, ",.0f", "on all ranks", f"{seconds * 1e3:,.0f} ms per step", *shares)
    mfu = _recent(records, "mfu_percent")
    share_of_peak = "" if mfu is None else f"{mfu:.1f}% of its peak (MFU)"
    add("TFLOP/s", _recent(records, "tflops"), ",.3g", "per device", share_of_peak)
    add("peak MiB", (last.get("peak_memory_bytes") or 0) / 2**20 or None, ",.0f", "of memory")
    if last["num_steps_by_type"]:
        lines += ["", *_table(last)]
    return [printable(line, keep="")[:width].rstrip() for line in lines]


def _bar(title: str, step: int, steps: int, seconds: float | None, width: int) -> str:
    step = min(step, steps)
    time_left = "" if seconds is None else f"{duration((steps - step) * seconds)} to go"
    size = max(width - 50, 10)
    bar = "#" * (size * step // steps)
    time_left = "done" if step == steps else time_left
    return f"{title:<12}[{bar:.<{size}}] {f'{step:,}/{steps:,}':<15} {time_left}"


def _recent(records: Sequence[Record], key: str) -> float | None:
    """Median of the last ten records: one slow step, such as a checkpoint's, does not count."""
    return costs.median(costs.values(records[-10:], key))


def sparkline(values: Sequence[float], width: int) -> str:
    """A line of blocks, low to high, each the mean of as many values as fit the width."""
    size = max(math.ceil(len(values) / width), 1)
    means = [statistics.fmean(values[i : i + size]) for i in range(0, len(values), size)]
    low = min(means, default=0.0)
    scale = (len(_BLOCKS) - 2) / ((max(means, default=0.0) - low) or math.inf)
    return "".join(_BLOCKS[1 + round((mean - low) * scale)] for mean in means)


def _table(last: Record) -> list[str]:
    """Newton-Schulz steps by type; for AMO also the observed and the planned ell."""
    figures, counts = last["optimizer"], last["num_steps_by_type"]
    titles = {}
    if any(key.startswith("amo/ell/") for key in figures):
        titles["ell"] = "observed ell"
        if last["phase"] in ("transition", "locked"):
            titles["ell_target"] = "composed for"
    lines = [f"{'type':<12}{'NS steps':>9}" + "".join(f"{title:>15}" for title in titles.values())]
    for name in sort_operator_types(counts):
        values = (figures.get(f"amo/{key}/{name}") for key in titles)
        texts = ("-" if value is None else format(value, ".2e") for value in values)
        lines.append(f"{name:<12}{counts[name]:>9}" + "".join(f"{text:>15}" for text in texts))
    return [*lines, f"{'total':<12}{sum(counts.values()):>9}"]
