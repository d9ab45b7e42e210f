"""The command ``doctor``: runs all checks, prints a verdict a line, and writes them as JSON."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from amo_dist.tools.command import Subparsers, positive
from amo_dist.tools.shapes import MODELS

if TYPE_CHECKING:
    from amo_dist.tools.doctor.examination import Verdict

MOST_SHARE = 2.0
"""Seconds that one figure may take, at most, to be measured on larger sizes."""
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "TORCHELASTIC_", "ROLE_")
"""What a launcher leaves in the environment; tests start ranks of their own."""


def add_doctor_command(subparsers: Subparsers) -> None:
    """Register ``doctor``: whether the optimizer runs here, and how fast."""
    parser = subparsers.add_parser(
        "doctor",
        help="check these ranks: versions, bandwidth, kernels, every layout, a step by part",
        description="Check the ranks that it is started on, whatever their device, and print a "
        "verdict a line. The exit status is 1 where a check failed.",
        epilog="example: torchrun --nproc-per-node 8 -m amo_dist doctor --model qwen3-1.7b "
        "--json doctor.json; launch/doctor.sh does so on a node, or under Slurm",
    )
    parser.add_argument(
        "--model",
        choices=sorted(map(str.lower, MODELS)),
        type=str.lower,
        help="whose step is timed (default: qwen3-1.7b on CUDA, else a small stand-in)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument(
        "--seconds",
        type=positive(86_400.0),
        default=300.0,
        help="for all checks together (default 300)",
    )
    parser.add_argument("--quick", action="store_true", help="the smallest sizes only")
    parser.add_argument(
        "--tests", action="store_true", help="then run the tests marked cuda, where there is CUDA"
    )
    parser.set_defaults(run=run_doctor)


def run_doctor(args: argparse.Namespace) -> int:
    """Run the checks for parsed arguments; a collective over all ranks of the launcher.

    Returns:
        1 on rank 0 where a check failed, else 0.
    """
    # Here, so that other commands start without them.
    from amo_dist.tools.doctor import hardware, optimizer
    from amo_dist.tools.doctor.examination import Examination, Verdict
    from amo_dist.tools.doctor.site import Fault, join

    is_first = os.environ.get("RANK", "0") == "0"
    if is_first and args.json is not None:
        args.json.open("a").close()  # minutes before it is written
    say = functools.partial(print, flush=True) if is_first else _say_nothing
    try:
        site = join(2 * args.seconds, 0.0 if args.quick else MOST_SHARE)
    except Fault as fault:
        lost = Verdict("ranks", "FAIL", str(fault))
        say(lost)
        return _report(args.json if is_first else None, "", [lost])
    say(f"amo doctor: {site}")
    examination = Examination(site, seconds=args.seconds, deadline=args.seconds / 4, say=say)
    # By this signal a launcher that has lost a rank ends the others.
    before = signal.signal(signal.SIGTERM, examination.stop)
    model = {name.lower(): name for name in MODELS}.get(args.model, "")
    examination.run([*hardware.checks(site), *optimizer.checks(site, model)])
    signal.signal(signal.SIGTERM, before)
    verdicts = list(examination.verdicts)
    if is_first and args.tests:
        verdicts.append(marked_tests(site.is_cuda))
        say(verdicts[-1])
    status = _report(args.json, str(site), verdicts) if is_first else 0
    if examination.is_stuck:
        # A thread that waits for a rank would hold back the end of the process.
        sys.stdout.flush()
        os._exit(status)
    if dist.is_initialized():
        dist.destroy_process_group()
    return status


def _say_nothing(_: object) -> None:
    """What ranks say beside rank 0."""


def _report(path: Path | None, site: str, verdicts: Sequence[Verdict]) -> int:
    """Write the JSON, if any is asked for, and return the exit status."""
    from amo_dist.tools.doctor.hardware import hardware_table

    if path is not None:
        passed = {one.name: one.values for one in verdicts if one.verdict == "ok"}
        checks = [dataclasses.asdict(one) for one in verdicts]
        found = {"site": site, "hardware": hardware_table(passed), "checks": checks}
        path.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(one.verdict == "FAIL" for one in verdicts))


def marked_tests(is_cuda: bool) -> Verdict:
    """Run the tests marked ``cuda`` in a process of its own, with its output; needs a checkout."""
    from amo_dist.tools.doctor.examination import Verdict

    name, root = "tests marked cuda", Path(__file__).resolve().parents[3]
    if not is_cuda:
        return Verdict(name, "skip", "no CUDA device")
    if not (root / "tests").is_dir():
        return Verdict(name, "skip", f"no tests in {root}, which is no checkout")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(LAUNCHED)}
    command = [sys.executable, "-m", "pytest", "-m", "cuda", "-q", "tests"]
    status = subprocess.run(command, cwd=root, env=environment, check=False).returncode
    return Verdict(name, "FAIL" if status else "ok", f"pytest ended with status {status}")
