"""``amo train``: where every training starts.

The command checks a config and tokenizes its text; torchrun then starts the ranks of this node,
each as ``python -m torchtitan_ext.train``. Under torchrun itself the command is one of its ranks.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan_ext import environment, train
from torchtitan_ext.runs.run_files import complete_steps, require_unlocked
from torchtitan_ext.runs.stores import join
from torchtitan_ext.signals import OUTCOME_FILE, STOPPED, end_at_once, handled

RANK = "torchtitan_ext.train"
"""Module that torchrun starts as a rank."""

LOGS = "logs"
"""Folder of the output of torchrun and of ranks, by start and host, in the dump folder."""


def add_command(subparsers: Any) -> None:
    """Register ``train``."""
    parser = subparsers.add_parser(
        "train",
        help="check a config and train it, on this node or on several",
        description="Check a TOML file and train its model on this node: one rank per GPU, or two "
        "ranks without GPUs. To train on several nodes, start the same command on each of them. "
        "Under torchrun each process of this command is one rank. Exit status 75 means that the "
        "run was stopped; the same command continues it.",
        epilog="Other options go to torchtitan, e.g. --training.steps 200 --optimizer.lr 2e-3.",
    )
    parser.add_argument("config", metavar="FILE", help="TOML file, such as those in configs")
    parser.add_argument("--ranks", type=int, help="ranks (processes) per node")
    parser.add_argument(
        "--nodes", type=int, help="number of nodes; each needs accelerators (or AMO_DEVICE=cpu)"
    )
    parser.add_argument(
        "--head",
        metavar="HOST:PORT",
        help="address at which the nodes meet: one of the nodes, and a free port on it",
    )
    parser.add_argument(
        "--run-id",
        default="amo",
        help="name of this run, the same on all nodes; runs with the same --head need other names",
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        help="how often, at most, all ranks start again after one failed (default 0)",
    )
    parser.add_argument(
        "--newest-step",
        action="store_true",
        help="make the checks of a start, and print the step of the newest complete checkpoint "
        "(or 0)",
    )
    parser.add_argument(
        "--numa-binding",
        choices=("node", "socket", "exclusive", "core-complex"),
        help="bind each rank to CPUs near its GPU, as torchrun does",
    )
    parser.set_defaults(run=run, overrides=[])


def run(args: argparse.Namespace) -> int:
    """Train for parsed arguments; a stop signal ends the process with status 75.

    Until torchrun handles the signals of ranks, imports and checks may take minutes, and process 1
    of a container ignores a signal that nobody handles.

    Returns:
        The status of :func:`start`.

    Raises:
        ValueError: The mistakes that :func:`check_and_start` names.
    """
    arguments = ["--job.config_file", args.config, *args.overrides]
    if environment.is_torchruns():
        os.execv(sys.executable, [sys.executable, "-u", "-m", RANK, *arguments])
    with handled(end_at_once):
        return check_and_start(args, arguments)


def check_and_start(args: argparse.Namespace, arguments: list[str]) -> int:
    """Make the checks, and start the ranks.

    Args:
        args: Parsed arguments.
        arguments: torchtitan's arguments.

    Returns:
        The status of :func:`start`.

    Raises:
        ValueError: For all mistakes of the config at once, a line for each; a file that is no
            TOML, a folder that another run writes into, a number of ranks that cannot work, or a
            node that cannot meet others.
    """
    print("loading PyTorch and torchtitan ...", file=sys.stderr, flush=True)
    from torchtitan_ext.config import checks, settings
    from torchtitan_ext.plugin import machine

    nodes = 1 if args.nodes is None else args.nodes
    for option, number, least in (("nodes", nodes, 1), ("restarts", args.restarts, 0)):
        if number < least:
            raise ValueError(f"--{option}: found {number}, expected {least} or more")
    if nodes > 1 and not args.head:
        raise ValueError("--head: found none, expected host:port of one of the nodes")
    if args.numa_binding and not machine.num_gpus():
        raise ValueError(f"--numa-binding: found {args.numa_binding!r}, which needs GPUs")
    config, problems = settings.load(arguments)
    ranks = pick_ranks(args.ranks, args.nodes)
    config, problems = checks.validate_config(config, ranks * nodes, problems)
    problems = problems or checks.missing_on_this_machine(config)
    if problems:
        raise ValueError("\n".join(dict.fromkeys(problems)))
    folder = Path(config.dump_folder)
    if args.newest_step:
        print(max(complete_steps(join(folder, config.checkpoint.folder)), default=0))
        return 0
    require_unlocked(folder, config.checkpoint.stop_seconds)
    on_nodes = f" on {nodes} nodes" if nodes > 1 else ""
    print(f"Training on {ranks * nodes} ranks{on_nodes}, in {folder}.", flush=True)
    options = [f"--nnodes={nodes}", f"--nproc-per-node={ranks}", f"--max-restarts={args.restarts}"]
    options += [f"--rdzv-endpoint={args.head or 'localhost:0'}", f"--rdzv-id={args.run_id}"]
    if nodes == 1:
        options.append("--local-addr=localhost")  # The host's name may not resolve.
    if args.numa_binding:
        options.append(f"--numa-binding={args.numa_binding}")
    return start(options, ["-m", RANK, *settings.for_ranks(config)], config, ranks)


def pick_ranks(ranks: int | None, nodes: int | None) -> int:
    """Processes of this node: ``--ranks``, or one per GPU, or two without GPUs.

    Args:
        ranks: Value of ``--ranks``.
        nodes: Value of ``--nodes``.

    Raises:
        ValueError: For a number above that of the GPUs, or for a node of several without any.
    """
    from torchtitan_ext.plugin import machine

    gpus, host = machine.num_gpus(), socket.gethostname()
    if nodes and not gpus and os.environ.get("AMO_DEVICE") != "cpu":
        raise ValueError(
            f"AMO_DEVICE: found no accelerator on {host}, expected one (nvidia-smi shows what the "
            "driver sees); AMO_DEVICE=cpu trains on CPUs"
        )
    if ranks is None:
        return machine.most_ranks()
    if ranks < 1 or (gpus and ranks > gpus):
        raise ValueError(f"--ranks: found {ranks}, expected 1 to {gpus or 'any'} ranks on {host}")
    return ranks


def start(options: list[str], program: list[str], config: Any, ranks: int) -> int:
    """Start the ranks of this node by torchrun, and report a failure in one line.

    Args:
        options: torchrun's options of the nodes and where they meet.
        program: Module of a rank as torchrun takes it, and the arguments of each rank.
        config: A complete config; its dump folder gets the logs of the ranks.
        ranks: Processes of this node.

    Returns:
        0 where training is done; 75 where it was stopped, all ranks have saved, and the same
        command goes on; 143 (or 128 and the signal's number) where a stop did not save; else the
        status of the rank that failed first, 1 where it had none.
    """
    from torch.distributed import DistError
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    from torchtitan_ext.plugin import machine

    environment.set_variables(ranks)
    os.environ[train.LAUNCHER] = str(os.getpid())
    # A rank that finds no device at a restart must fail, instead of training on its CPU.
    os.environ.setdefault("AMO_DEVICE", machine.device_type())
    host = socket.gethostname().partition(".")[0]
    logs = Path(config.dump_folder, LOGS, f"{time.strftime('%Y%m%d-%H%M%S')}-{host}")
    logs.mkdir(parents=True, exist_ok=True)
    # torchrun's own log, a screen per failure, goes to a file.
    log = logging.getLogger("torch.distributed.elastic")
    handler = logging.FileHandler(logs / "torchrun.txt")
    handler.handleError = lambda record: None  # type: ignore[method-assign]  # on a full disk
    log.addHandler(handler)
    log.propagate = False
    stop_seconds = config.checkpoint.stop_seconds
    command = [
        *options,
        "--rdzv-backend=c10d",
        f"--log-dir={logs}",
        # One rank of each node shows what it prints; warnings and tracebacks of all go to files.
        "--redirects=" + ",".join(f"{rank}:{3 if rank else 2}" for rank in range(ranks)),
        # A closed terminal ends this process alone; its ranks then save and leave.
        "--signals-to-handle=SIGTERM,SIGINT",
        f"--shutdown-timeout={stop_seconds + 30}",
        *program,
    ]
    status = 0
    try:
        torchrun.run(torchrun.parse_args(command))
        reason = "error: some ranks did not exit after SIGKILL"
    except ChildFailedError as error:
        reason, status = explain(error.failures)
        print(f"{reason}; logs: {logs}", file=sys.stderr)
        return status
    except SignalException as error:
        status = 128 + error.sigval
        reason = f"error: stopped by {error.sigval.name}, and not every rank saved and left within "
        reason += f"checkpoint.stop_seconds = {stop_seconds}"
    except (RendezvousError, DistError) as error:
        cause = " ".join(str(error).split()) or type(error).__name__
        reason = f"error: the nodes did not meet: {cause}; another node may print why"
    outcomes = _outcomes(logs, ranks)
    if "unsaved" in outcomes:
        print("error: stopped, and nothing is saved: checkpoints are off", file=sys.stderr)
        return status or train.UNSAVED
    if "stopped" in outcomes:
        print("Stopped; the same command goes on.", flush=True)
        return STOPPED
    if outcomes:
        return 0
    print(f"{reason}; logs: {logs}", file=sys.stderr)
    return status or train.FAILED


def _outcomes(logs: Path, ranks: int) -> set[str]:
    """Outcomes of the ranks of the start in which each rank left one; empty if none did."""
    for start_folder in logs.glob("*/attempt_*"):
        files = [*start_folder.glob(f"*/{OUTCOME_FILE}")]
        if len(files) == ranks:
            return {file.read_text() for file in files}
    return set()


# Signs of a collective that failed as another rank was gone.
_LOST_PEER = ("/gloo/", "DistBackendError", "DistNetworkError")


def explain(failures: Mapping[int, Any]) -> tuple[str, int]:
    """The reason why ranks failed, in one line, and the exit status.

    A user's mistake comes first, then a rank that was killed, then the rank that failed first. A
    rank that only misses another one comes last.

    Args:
        failures: ``ProcessFailure`` of torch by rank.
    """

    def order(rank: int) -> tuple[object, ...]:
        failure = failures[rank]
        # torchrun ends the other ranks by SIGTERM, so another signal was the first failure.
        was_killed = failure.exitcode in (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS)
        is_lost = any(sign in _message(failure) for sign in _LOST_PEER)
        is_mistake = failure.exitcode == train.USER_ERROR
        return not is_mistake, not was_killed, is_lost, failure.timestamp, rank

    rank = min(failures, key=order)
    status = failures[rank].exitcode
    return f"error (rank {rank}): {_message(failures[rank])}", max(status, train.FAILED)


def _message(failure: Any) -> str:
    """The error that a rank has left, or the status or signal by which it ended."""
    if isinstance(failure.message, dict):
        message = " ".join(str(failure.message.get("message")).split())[:400]
        is_mistake = failure.exitcode == train.USER_ERROR
        return message.removeprefix("ValueError: ") if is_mistake else message
    if failure.exitcode > 0:
        return f"ended with status {failure.exitcode}"
    name = signal.Signals(-failure.exitcode).name
    return f"ended by {name}{'; its memory may have run out' if name == 'SIGKILL' else ''}"
