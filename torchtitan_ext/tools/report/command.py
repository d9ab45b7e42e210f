"""The command line of ``amo report``, and the content of its page."""

from __future__ import annotations

import argparse
import base64
import io
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan_ext.runs import files
from torchtitan_ext.tools.report import data, figures
from torchtitan_ext.tools.report.data import Run

TEMPLATE = Path(__file__).with_name("page.html")
NONE = "\N{EN DASH}"


def add_command(subparsers: Any) -> None:
    """Register ``report``."""
    parser = subparsers.add_parser(
        "report",
        help="draw loss, schedule and plan of runs in one HTML file",
        description="Write loss, rate, gradient norm, throughput, schedule and plan of runs into "
        "one HTML file that opens offline. Needs matplotlib and Jinja (the extra 'plots').",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument(
        "-o", "--output", default="report.html", help="file to write (default %(default)s)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the report for parsed arguments.

    Raises:
        ValueError: A run cannot be read.
    """
    print("loading matplotlib ...", file=sys.stderr, flush=True)
    import jinja2

    runs = [data.load(folder) for folder in args.runs]
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    with figures.style():
        text = environment.from_string(TEMPLATE.read_text("utf-8")).render(
            title=f"AMO report: {', '.join(run.label for run in runs)}",
            labels=[run.label for run in runs],
            facts=facts(runs),
            sections=sections(runs),
        )
    output = Path(args.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    files.replace(output, text)
    print(f"written to {output} ({output.stat().st_size / 1e6:.2f} MB)")
    return 0


class Section(NamedTuple):
    """A part of the report under one title.

    Attributes:
        image: Data URL of a picture; empty without one.
        text: Caption of the picture, or a text of aligned lines.
    """

    title: str
    image: str
    text: str


def sections(runs: Sequence[Run]) -> list[Section]:
    """Sections with content, in the order of the page."""
    caption = "Averaged over ranks at the logged steps. Dots: validation loss."
    parts = [Section("Training", _image(figures.training(runs)), caption)]
    for run in runs:
        label = f", {run.label}" if len(runs) > 1 else ""
        if (schedule := figures.schedule(run)) is not None:
            title = f"Newton-Schulz steps by operator type{label}"
            parts.append(Section(title, _image(schedule), "Darker: more steps."))
        if run.plan is not None:
            parts.append(Section(f"Plan{label}", "", str(run.plan)))
    return parts


def _image(figure: Any) -> str:
    """A picture as a data URL: the ids of two inline figures would collide."""
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(file.getvalue()).decode()


def facts(runs: Sequence[Run]) -> list[list[str]]:
    """A row for each figure that any run has: its name, and a cell for each run."""
    columns = [_facts(run) for run in runs]
    rows = [[name, *(column[name] or NONE for column in columns)] for name in columns[0]]
    return [row for row in rows if any(cell != NONE for cell in row[1:])]


def _facts(run: Run) -> dict[str, str | None]:
    last, model = run.metrics[-1], run.config.get("model", {})
    total, lock, tokens = last.get("training_steps"), last.get("lock_step"), last.get("num_tokens")
    speeds = [value for _, value in run.series("tokens_per_second")]
    speed = statistics.median(speeds) if speeds else None
    # 0 is no measurement, as after a resume.
    residuals = [value for _, value in run.series("newton_schulz/residual") if value]
    counts = last["num_steps_by_type"]
    mfu = [value for _, value in run.series("mfu_percent")]
    times = dict(run.series("slowest_optimizer_seconds_per_step"))
    at = max(times, key=lambda step: times[step], default=0)
    rank = dict(run.series("slowest_optimizer_rank")).get(at)
    slowest = f"{times[at]:.4g} s on rank {rank}, at step {at}" if times else None

    def newest(name: str) -> str | None:
        values = run.series(name)
        return f"{values[-1][1]:.4g}" if values else None

    return {
        "model": f"{model['name']} {model['flavor']}" if model else None,
        "optimizer": run.config.get("optimizer", {}).get("name"),
        "steps": f"{last['step']:,}" + (f" of {total:,}" if total else ""),
        "tokens": None if tokens is None else f"{tokens:,.0f}",
        "tokens per second, median": None if speed is None else f"{speed:,.0f}",
        "MFU, median": f"{statistics.median(mfu):.1f} %" if mfu else None,
        "slowest optimizer step": slowest,
        "loss": newest("loss"),
        "validation loss": f"{run.validations[-1][1]:.4g}" if run.validations else None,
        "gradient norm": newest("grad_norm"),
        "phase": last["phase"],
        "locked at step": str(lock) if lock and last["phase"] == "locked" else None,
        "Newton-Schulz steps": " ".join(f"{k} {v}" for k, v in counts.items()) or None,
        "residual after Newton-Schulz": f"{residuals[-1]:.3g}" if residuals else None,
    }
