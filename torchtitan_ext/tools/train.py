"""``amo train``: where every training starts.

The command checks a config and tokenizes its text; torchrun's launcher then starts the ranks of
this node, each as ``python -m torchtitan_ext.train``. Under torchrun itself the command is one of
its ranks.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from amo_dist.tools.command import MOST_RANKS, MOST_WORLD, Subparsers, whole
from torchtitan_ext import environment, train
from torchtitan_ext.runs.run_files import complete_steps, require_unlocked
from torchtitan_ext.signals import OUTCOME_FILE, STOPPED

ALONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "0",  # any free one
}
"""Environment that torchrun would set for the only rank of a run."""

RANK = ("-u", "-m", "torchtitan_ext.train")
"""Arguments of Python that start a rank."""

LOGS = "logs"
"""Folder of the output of torchrun and of ranks, by start and host, in the dump folder."""

NUMA = ("node", "socket", "exclusive", "core-complex")
"""Modes of torchrun's ``--numa-binding``."""


def add_command(subparsers: Subparsers) -> None:
    """Register ``train``."""
    parser = subparsers.add_parser(
        "train",
        help="check a config and train it, on this node or on several",
        description="Check a TOML file and train its model on this node: one rank per GPU, or two "
        "ranks without GPUs. It takes fewer ranks if the global batch cannot be divided among so "
        "many. To train on several nodes, start the same command on each of them. Under torchrun "
        "each process of this command is one rank. Exit status 75 means that the run was stopped; "
        "the same command continues it.",
        epilog="Other options go to torchtitan, e.g. --training.steps 200 --optimizer.lr 2e-3.",
    )
    parser.add_argument("config", metavar="FILE", help="TOML file, such as those in configs")
    parser.add_argument(
        "--ranks",
        type=whole(1, MOST_RANKS),
        help="ranks (processes) per node; 1 trains in this process",
    )
    parser.add_argument(
        "--nodes",
        type=whole(1, MOST_WORLD),
        help="number of nodes; each needs accelerators (or AMO_DEVICE=cpu)",
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
        type=whole(0, 1000),
        default=0,
        help="how often, at most, all ranks start again after one failed (default 0)",
    )
    parser.add_argument(
        "--newest-step",
        action="store_true",
        help="only check the file, and print the step of the newest complete checkpoint (or 0)",
    )
    parser.add_argument(
        "--numa-binding", choices=NUMA, help="bind each rank to CPUs near its GPU, as torchrun does"
    )
    parser.set_defaults(run=run, overrides=[])


def run(args: argparse.Namespace) -> int:
    """Train for parsed arguments.

    Returns:
        The status of :func:`start`; 2 for mistakes, which are reported all at once.

    Raises:
        ValueError: For a file that is no TOML, a folder that another run writes into, a number of
            ranks that cannot work, or a node that cannot meet others.
    """
    arguments = ["--job.config_file", args.config, *args.overrides]
    if "RANK" in os.environ:  # torchrun's
        return _train(arguments)
    from torchtitan_ext.config import settings
    from torchtitan_ext.plugin import machine

    if args.newest_step:
        config = settings.load(arguments)
        print(max(complete_steps(Path(config.dump_folder, config.checkpoint.folder)), default=0))
        return 0
    nodes, head = args.nodes or 1, args.head or "localhost:0"
    if not head.rpartition(":")[2].isdecimal() or (nodes > 1 and not args.head):
        raise ValueError(f"--head: found {args.head!r}, expected host:port of one of the nodes")
    if not re.fullmatch(r"[\w.-]{1,99}", args.run_id):  # part of a folder's name
        raise ValueError(
            f"--run-id: found {args.run_id!r}, expected letters, digits, '.', '-', '_'"
        )
    if args.numa_binding and not machine.num_gpus():
        raise ValueError(f"--numa-binding: found {args.numa_binding!r}, expected none without GPUs")
    config = settings.load(arguments)
    ranks = pick_ranks(args.ranks, args.nodes, config)
    config, problems = examine(config, ranks, nodes)
    if problems:
        for problem in dict.fromkeys(problems):
            print(f"error: {problem}", file=sys.stderr)
        return train.USER_ERROR
    folder = Path(config.dump_folder)
    require_unlocked(folder, config.checkpoint.stop_seconds)
    if ranks * nodes == 1 and not args.restarts:
        environment.set_variables(1)
        _tokenize_first(config)
        os.environ.update(ALONE | {k: v for k, v in os.environ.items() if k in ALONE})
        return _train(arguments)
    on_nodes = f" on {nodes} nodes" if nodes > 1 else ""
    print(f"Training on {ranks * nodes} ranks{on_nodes}, in {folder}.", flush=True)
    return start(
        settings.for_ranks(config),
        config,
        ranks,
        nodes=nodes,
        head=head,
        run_id=args.run_id,
        restarts=args.restarts,
        numa_binding=args.numa_binding,
    )


def examine(config: Any, ranks: int, nodes: int = 1) -> tuple[Any, list[str]]:
    """Complete a config and check it for this node; what this machine lacks comes last.

    Args:
        config: Config as :func:`torchtitan_ext.config.settings.load` reads it.
        ranks: Processes of a node.
        nodes: Nodes of the run.

    Returns:
        The config, and a line for each mistake.
    """
    from torchtitan_ext.plugin import machine
    from torchtitan_ext.tools import preflight_here

    # A rank on CPU has its share of the machine's memory.
    memory_gb = machine.gpu_memory_gb() or machine.memory_bytes() / ranks / 1e9
    config, problems = preflight_here.examine(config, ranks * nodes, memory_gb)
    return config, problems or preflight_here.lacks(config)


def start(
    arguments: list[str],
    config: Any,
    ranks: int,
    *,
    nodes: int = 1,
    head: str = "localhost:0",
    run_id: str = "amo",
    restarts: int = 0,
    numa_binding: str | None = None,
) -> int:
    """Start the ranks of this node by torchrun's launcher, and report a failure in one line.

    Args:
        arguments: Arguments of each rank, from :func:`torchtitan_ext.config.settings.for_ranks`.
        config: A complete config; its dump folder gets the logs of the ranks.
        ranks: Processes of this node.
        nodes: Number of nodes of the run.
        head: ``host:port`` at which the nodes meet.
        run_id: Name of the run, the same on all nodes.
        restarts: Most restarts of all ranks after a failure. A mistake that only a rank can see
            is restarted, too: torchrun cannot tell the two apart.
        numa_binding: One of `NUMA`.

    Returns:
        0 where training is done; 75 where it was stopped, all ranks have saved, and the same
        command goes on; 143 (or 128 and the signal's number) where a stop did not save; else the
        status of the rank that failed first, 1 where it had none.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch
    from torch.numa.binding import AffinityMode, NumaOptions

    from torchtitan_ext.plugin import machine

    if nodes == 1:  # On several nodes the first rank tokenizes while the others wait.
        _tokenize_first(config)
    environment.set_variables(ranks)
    os.environ[train.LAUNCHER] = str(os.getpid())
    # A rank that finds no device at a restart must fail, instead of training on its CPU.
    os.environ.setdefault("AMO_DEVICE", machine.device_type())
    host = socket.gethostname().partition(".")[0]
    logs = Path(config.dump_folder, LOGS, f"{time.strftime('%Y%m%d-%H%M%S')}-{host}")
    logs.mkdir(parents=True, exist_ok=True)
    # One rank of each node shows what it prints; warnings and tracebacks of all go to files.
    to_files = {rank: Std.ALL if rank else Std.ERR for rank in range(ranks)}
    stop_seconds = config.checkpoint.stop_seconds
    launch = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=ranks,
        run_id=run_id,
        rdzv_backend="c10d",
        rdzv_endpoint=head,
        local_addr="localhost" if nodes == 1 else None,  # The host's name may not resolve.
        max_restarts=restarts,
        logs_specs=DefaultLogsSpecs(str(logs), redirects=to_files),
        numa_options=NumaOptions(AffinityMode(numa_binding)) if numa_binding else None,
        # A closed terminal ends this process alone; its ranks then save and leave.
        signals_to_handle="SIGTERM,SIGINT",
        shutdown_timeout=stop_seconds + 30,
    )
    try:
        with _launchers_log(logs):
            done = elastic_launch(launch, sys.executable)(*RANK, *arguments)
        if len(done) == ranks:
            return _end(logs, ranks, 0)
        reason, status = "error: some ranks did not exit after SIGKILL", train.FAILED
    except ChildFailedError as error:
        reason, status = explain(error.failures)
    except SignalException as error:
        status = 128 + error.sigval
        if _outcomes(logs, ranks):
            return _end(logs, ranks, status)
        reason = f"error: stopped by {error.sigval.name}, and not every rank saved and left within "
        reason += f"checkpoint.stop_seconds = {stop_seconds}"
    except (RendezvousError, DistError) as error:
        cause = " ".join(str(error).split()) or type(error).__name__
        reason = f"error: not all nodes met at {head}: {cause}; another node may print why"
        status = train.FAILED
    print(f"{reason}; logs: {logs}", file=sys.stderr)
    return status


def _end(logs: Path, ranks: int, status: int) -> int:
    """Exit status of a run whose ranks ended in order; ``status`` where a stop saved nothing."""
    outcomes = _outcomes(logs, ranks)
    if "unsaved" in outcomes:
        print("error: stopped, and nothing is saved: checkpoints are off", file=sys.stderr)
        return status or train.UNSAVED
    if "stopped" in outcomes:
        print("Stopped; the same command goes on.", flush=True)
        return STOPPED
    return 0


def _outcomes(logs: Path, ranks: int) -> set[str]:
    """Outcomes of the ranks of the start in which each rank left one; empty if none did."""
    for start_folder in logs.glob("*/attempt_*"):
        files = [*start_folder.glob(f"*/{OUTCOME_FILE}")]
        if len(files) == ranks:
            return {file.read_text() for file in files}
    return set()


_LOST_PEER = ("/gloo/", "DistBackendError", "DistNetworkError")
"""Signs of a collective that failed as another rank was gone."""


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


@contextmanager
def _launchers_log(folder: Path) -> Iterator[None]:
    """Write torchrun's own log, a screen per failure, to a file; restore its signal handlers."""
    log = logging.getLogger("torch.distributed.elastic")
    handler = logging.FileHandler(folder / "torchrun.txt")
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    log.addHandler(handler)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = True
        handler.close()
        for number, handler_before in before.items():
            signal.signal(number, handler_before)


def _tokenize_first(config: Any) -> None:
    from torchtitan_ext.data.loader import tokenize_first  # imports torchtitan

    tokenize_first(config)


def _train(arguments: list[str]) -> int:
    """Train in this process."""
    try:
        return train.main(arguments)
    except (OSError, ValueError):
        # Mistakes of the user are explained already; the front door would drop the traceback.
        traceback.print_exc()
        return 1


def pick_ranks(ranks: int | None, nodes: int | None, config: Any) -> int:
    """Processes of this node: ``--ranks``, or the most that divide the global batch.

    On several nodes all GPUs count: a node that sees fewer than the others must not train.

    Args:
        ranks: Value of ``--ranks``.
        nodes: Value of ``--nodes``.
        config: Config as :func:`torchtitan_ext.config.settings.load` reads it.

    Raises:
        ValueError: For a number above that of the GPUs, or for a node of several without any.
    """
    from torchtitan_ext.config import checks
    from torchtitan_ext.plugin import machine

    gpus = machine.num_gpus()
    if nodes and not gpus and os.environ.get("AMO_DEVICE") != "cpu":
        raise ValueError(
            f"AMO_DEVICE: found no accelerator on {socket.gethostname()}, expected one (nvidia-smi "
            "shows what the driver sees); AMO_DEVICE=cpu trains on CPUs"
        )
    if ranks is not None:
        if gpus and ranks > gpus:
            raise ValueError(
                f"--ranks: found {ranks}, expected 1 to {gpus}, the GPUs of {socket.gethostname()}"
            )
        return ranks
    most = machine.most_ranks()
    if nodes:
        return most
    for num_ranks in range(most, 0, -1):
        problems: list[str] = []
        checks.collect(problems, lambda: checks.check_batch(config, num_ranks))  # noqa: B023
        if not problems:
            return num_ranks
    return most
