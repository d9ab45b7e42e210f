"""Command ``doctor``: runs all checks, and prints one verdict per line."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``doctor`` to its parser."""
    parser.description = (
        "Check machines, network and optimizer on all ranks that start this command, and print one "
        "verdict per line. The exit status is 1 if a check failed. Example: torchrun "
        "--nproc-per-node 8 -m amo_dist doctor"
    )
    probe = "run only quick checks: arithmetic, network, and the disk of FOLDER"
    parser.add_argument("--probe", type=Path, metavar="FOLDER", help=probe)
    limit = "time limit of all checks together (default 300)"
    parser.add_argument("--seconds", type=float, default=300.0, help=limit)
    parser.set_defaults(run=run_doctor)


def run_doctor(args: argparse.Namespace) -> int:
    """Run the checks for parsed arguments; a collective over all ranks of the launcher.

    Returns:
        1 on rank 0 if a check failed, else 0.

    Raises:
        ValueError: ``--seconds`` is no time, or PyTorch sees no GPU under NVIDIA's driver.
    """
    if not 0 < args.seconds <= 86_400:
        raise ValueError(f"--seconds: found {args.seconds}, expected a number > 0 and <= 86400")
    # Imported here, because other commands need not wait for these modules.
    import torch.distributed as dist

    from amo_dist.doctor import machine, optimizer
    from amo_dist.doctor.examination import examine
    from amo_dist.doctor.site import Fault, join

    if os.environ.get("AMO_DEVICE") != "cpu":
        machine.require_usable_driver()
    is_first = os.environ.get("RANK", "0") == "0"

    def print_first(line: object) -> None:
        if is_first:
            print(line, flush=True)

    try:
        site = join(2 * args.seconds)
    except Fault as fault:
        print_first(f"FAIL ranks: {fault}")
        return int(is_first)
    print_first(f"amo doctor: {site}")
    logging.disable(logging.WARNING)  # checks provoke warnings
    checks = machine.checks(site, args.probe)
    if args.probe is None:
        checks += optimizer.checks(site)
    verdicts = []
    for verdict in examine(site, checks, args.seconds):
        print_first(verdict)
        verdicts.append(verdict)
    status = int(is_first and any(outcome.verdict == "FAIL" for outcome in verdicts))
    if any(outcome.is_last for outcome in verdicts):
        # A thread that waits for a rank would keep the process from ending.
        sys.stdout.flush()
        os._exit(status)
    logging.disable(logging.NOTSET)
    if dist.is_initialized():
        dist.destroy_process_group()
    return status
