"""The command ``doctor``: runs all checks, prints a verdict a line, and writes them as JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from amo_dist.tools.command import Subparsers, positive

if TYPE_CHECKING:
    from amo_dist.tools.doctor.examination import Verdict


def add_doctor_command(subparsers: Subparsers) -> None:
    """Register ``doctor``: whether the optimizer runs here."""
    parser = subparsers.add_parser(
        "doctor",
        help="check these ranks: all-to-all, spectra, every layout, what may go wrong in a run",
        description="Check the ranks that it is started on, whatever their device, and print a "
        "verdict a line. The exit status is 1 where a check failed.",
        epilog="example: torchrun --nproc-per-node 8 -m amo_dist doctor "
        "--json doctor.json; launch/doctor.sh does so on a node, or under Slurm",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument(
        "--seconds",
        type=positive(86_400.0),
        default=300.0,
        help="for all checks together (default 300)",
    )
    parser.set_defaults(run=run_doctor)


def run_doctor(args: argparse.Namespace) -> int:
    """Run the checks for parsed arguments; a collective over all ranks of the launcher.

    Returns:
        1 on rank 0 where a check failed, else 0.
    """
    # Here, so that other commands start without them.
    from amo_dist.tools.doctor import machine, optimizer
    from amo_dist.tools.doctor.examination import Examination, Verdict
    from amo_dist.tools.doctor.site import Fault, join

    is_first = os.environ.get("RANK", "0") == "0"
    if is_first and args.json is not None:
        # Minutes before it is written; a pipe that nobody reads would wait for good.
        os.close(os.open(args.json, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o666))

    def say(line: object) -> None:
        if is_first:
            print(line, flush=True)

    try:
        site = join(2 * args.seconds)
    except Fault as fault:
        lost = Verdict("ranks", "FAIL", str(fault))
        say(lost)
        return _report(args.json if is_first else None, "", [lost])
    say(f"amo doctor: {site}")
    logger = logging.getLogger("amo_dist")
    level = logger.level
    examination = Examination(site, seconds=args.seconds, deadline=args.seconds / 4, say=say)
    logger.setLevel(logging.ERROR)  # checks make what it warns of
    try:
        examination.run([*machine.checks(site), *optimizer.checks(site)])
    finally:
        logger.setLevel(level)
    status = _report(args.json, str(site), examination.verdicts) if is_first else 0
    if examination.is_stuck:
        # A thread that waits for a rank would hold back the end of the process.
        sys.stdout.flush()
        os._exit(status)
    if dist.is_initialized():
        dist.destroy_process_group()
    return status


def _report(path: Path | None, site: str, verdicts: Sequence[Verdict]) -> int:
    """Write the JSON, if any is asked for, and return the exit status."""
    if path is not None:
        found = {"site": site, "checks": [dataclasses.asdict(one) for one in verdicts]}
        path.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(one.verdict == "FAIL" for one in verdicts))
