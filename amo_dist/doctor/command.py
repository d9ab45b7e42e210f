"""Command ``doctor``: runs all checks, prints one verdict per line, and writes them as JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``doctor`` to its parser."""
    parser.description = (
        "Check machines, network and optimizer on all ranks that start this command, and print one "
        "verdict per line. The exit status is 1 if a check failed. Example: torchrun "
        "--nproc-per-node 8 -m amo_dist doctor --json doctor.json"
    )
    probe = "run only quick checks: arithmetic, network, and the disk of FOLDER"
    parser.add_argument("--probe", type=Path, metavar="FOLDER", help=probe)
    values = "write the values of every rank to FILE"
    parser.add_argument("--json", type=Path, metavar="FILE", help=values)
    limit = "time limit of all checks together (default 300)"
    parser.add_argument("--seconds", type=float, default=300.0, help=limit)
    parser.set_defaults(run=run_doctor)


def run_doctor(args: argparse.Namespace) -> int:
    """Run the checks for parsed arguments; a collective over all ranks of the launcher.

    Returns:
        1 on rank 0 if a check failed, else 0.

    Raises:
        ValueError: ``--seconds`` is no time.
        OSError: The file of ``--json`` cannot be written.
    """
    if not 0 < args.seconds <= 86_400:
        raise ValueError(f"--seconds: found {args.seconds}, expected a number > 0 and <= 86400")
    # Imported here, because other commands need not wait for these modules.
    import torch.distributed as dist

    from amo_dist.doctor import machine, optimizer
    from amo_dist.doctor.examination import Examination
    from amo_dist.doctor.site import Fault, join

    is_first = os.environ.get("RANK", "0") == "0"
    if is_first and args.json is not None:
        args.json.touch()  # fails now, not after minutes, if the file cannot be written
        if not args.json.is_file():  # a pipe without a reader would block for good
            raise ValueError(f"--json: found {args.json}, expected a regular file")

    def print_first(line: object) -> None:
        if is_first:
            print(line, flush=True)

    try:
        site = join(2 * args.seconds)
    except Fault as fault:
        print_first(f"FAIL ranks: {fault}")
        return int(is_first)
    print_first(f"amo doctor: {site}")
    for name in ("amo_dist", "torch.distributed.tensor"):  # checks provoke their warnings
        logging.getLogger(name).setLevel(logging.ERROR)
    examination = Examination(site, args.seconds, print_first)
    if args.probe is None:
        examination.run([*machine.checks(site), *optimizer.checks(site)])
    else:
        examination.run(machine.probe(site, args.probe))
    if is_first and args.json is not None:
        checks = [dataclasses.asdict(verdict) for verdict in examination.verdicts]
        args.json.write_text(json.dumps({"site": str(site), "checks": checks}, indent=1) + "\n")
    has_failed = any(verdict.verdict == "FAIL" for verdict in examination.verdicts)
    status = int(is_first and has_failed)
    if examination.is_stuck:
        # A thread that waits for a rank would keep the process from ending.
        sys.stdout.flush()
        os._exit(status)
    if dist.is_initialized():
        dist.destroy_process_group()
    return status
