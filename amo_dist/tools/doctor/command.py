"""Command ``doctor``: runs all checks, prints one verdict per line, and writes them as JSON."""

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

from amo_dist.tools.command import Subparsers, positive

if TYPE_CHECKING:
    from amo_dist.tools.doctor.examination import Verdict


def add_doctor_command(subparsers: Subparsers) -> None:
    """Register ``doctor``."""
    parser = subparsers.add_parser(
        "doctor",
        help="check machines, network and optimizer on all ranks before training",
        description="Check machines, network and optimizer on all ranks that start this command, "
        "and print one verdict per line. The exit status is 1 if a check failed.",
        epilog="example: torchrun --nproc-per-node 8 -m amo_dist doctor "
        "--json doctor.json; launch/doctor.sh runs this on a node or under Slurm",
    )
    parser.add_argument(
        "--probe",
        type=Path,
        metavar="FOLDER",
        help="run only three quick checks: one Newton-Schulz, the disk of FOLDER, an all-reduce",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the values of every rank to FILE"
    )
    parser.add_argument(
        "--seconds",
        type=positive(86_400.0),
        default=300.0,
        help="time limit of all checks together (default 300)",
    )
    parser.set_defaults(run=run_doctor)


def run_doctor(args: argparse.Namespace) -> int:
    """Run the checks for parsed arguments; a collective over all ranks of the launcher.

    Returns:
        1 on rank 0 if a check failed, else 0.
    """
    # Imported here, because other commands need not wait for these modules.
    import torch.distributed as dist

    from amo_dist.tools.doctor import machine, optimizer, probe
    from amo_dist.tools.doctor.examination import Examination, Verdict
    from amo_dist.tools.doctor.site import Fault, join, name_ranks

    is_first = os.environ.get("RANK", "0") == "0"
    if is_first and args.json is not None:
        # Fails now, not after minutes, if the file cannot be written; without O_NONBLOCK a pipe
        # that nobody reads would block for good.
        os.close(os.open(args.json, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o666))

    def print_first(line: object) -> None:
        if is_first:
            print(line, flush=True)

    try:
        site = join(2 * args.seconds)
    except Fault as fault:
        missing = Verdict("ranks", "FAIL", str(fault))
        print_first(missing)
        return _write(args.json if is_first else None, "", [missing])
    print_first(f"amo doctor: {site}")
    for host, ranks in zip(site.hosts, site.nodes, strict=False):
        print_first(f"node {host}: {name_ranks(ranks)}")
    logger = logging.getLogger("amo_dist")
    level = logger.level
    examination = Examination(
        site, seconds=args.seconds, deadline=args.seconds / 4, report=print_first
    )
    logger.setLevel(logging.ERROR)  # checks provoke its warnings
    try:
        if args.probe is None:
            examination.run([*machine.checks(site), *optimizer.checks(site)])
        else:
            examination.run(probe.checks(site, args.probe))
    finally:
        logger.setLevel(level)
    status = _write(args.json, str(site), examination.verdicts) if is_first else 0
    if examination.is_stuck:
        # A thread that waits for a rank would keep the process from ending.
        sys.stdout.flush()
        os._exit(status)
    if dist.is_initialized():
        dist.destroy_process_group()
    return status


def _write(path: Path | None, site: str, verdicts: Sequence[Verdict]) -> int:
    """Write the verdicts as JSON if a path is set, and return the exit status."""
    if path is not None:
        record = {"site": site, "checks": [dataclasses.asdict(verdict) for verdict in verdicts]}
        path.write_text(json.dumps(record, indent=1) + "\n")
    return int(any(verdict.verdict == "FAIL" for verdict in verdicts))
