"""``python -m torchtitan_ext.tools.nodes FILE``: this node's ranks of a run on several nodes.

What ``launch/train_nodes.sh`` starts; that script tells the environment variables. The exit status
is 0 where training is done, or was told to stop and has saved; 2 for a mistake, which a restart
would not mend; 1 where ranks failed more often than they may; 128 and the number of the signal
where ranks that were told to stop did not end well in time.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_ext import train

USAGE = "usage: NODES=4 HEAD=node0:29500 launch/train_nodes.sh CONFIG.toml [options]"


@dataclass(frozen=True, slots=True)
class Node:
    """What this node does for a run.

    Attributes:
        num_nodes: Of the run.
        head: ``host:port`` where all meet.
        ranks: Processes here.
        device: Kind of the accelerator that each rank must find, or ``cpu``.
        run_id: The same on all nodes.
        max_restarts: Failures after which ranks are started again, since the start or since the
            last new checkpoint.
        logs: Folder.
    """

    num_nodes: int
    head: str
    ranks: int
    device: str
    run_id: str = "amo"
    max_restarts: int = 3
    logs: Path = Path("outputs/logs")

    @classmethod
    def of(cls, variables: Mapping[str, str]) -> Node:
        """The node that environment variables describe.

        Raises:
            ValueError: For one that is not as expected, or where accelerators are missing.
        """
        num_nodes, head = _number(variables, "NODES", 1, 1), variables.get("HEAD", "")
        if not head.rpartition(":")[2].isdecimal():
            raise ValueError(f"HEAD: found {head!r}, expected host:port; {USAGE}")
        run_id = variables.get("RUN_ID") or "amo"
        device, found = _devices()
        asked = variables.get("GPUS") or "auto"
        ranks = found if asked == "auto" else _number(variables, "GPUS", 1, 1)
        if device != "cpu" and ranks > found:
            raise ValueError(
                f"GPUS: found {ranks}, expected at most {found}, the accelerators that are visible "
                f"on {socket.gethostname()}"
            )
        restarts = _number(variables, "MAX_RESTARTS", 3, 0)
        logs = Path(variables.get("LOGS") or "outputs/logs") / run_id
        return cls(num_nodes, head, ranks, device, run_id, restarts, logs)


def _number(variables: Mapping[str, str], name: str, default: int, least: int) -> int:
    found = variables.get(name) or str(default)
    if not found.isdecimal() or int(found) < least:
        raise ValueError(f"{name}: found {found!r}, expected an integer >= {least}")
    return int(found)


def _devices() -> tuple[str, int]:
    """Kind and number of what ranks run on.

    Raises:
        ValueError: For a node without accelerator, whose ranks would be CPU ranks among others.
    """
    import torch

    from torchtitan_ext.plugin import machine

    kind = machine.device_type()
    if kind == "cpu":
        if os.environ.get("AMO_DEVICE") != "cpu":
            raise ValueError(
                f"AMO_DEVICE: found no accelerator on {socket.gethostname()}, expected one "
                "(nvidia-smi shows what the driver sees); AMO_DEVICE=cpu trains on CPUs"
            )
        return kind, os.cpu_count() or 1
    return kind, torch.get_device_module(kind).device_count()


def main(arguments: Sequence[str] | None = None) -> int:
    """Train.

    Args:
        arguments: A TOML file and options of torchtitan; those of the process by default.

    Returns:
        The exit status, see the top.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        node, command, progress, grace = _prepare(arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return train.USER_ERROR
    # torchrun keeps one store for all restarts: ranks would read the addresses of dead ones.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ["AMO_DEVICE"] = node.device  # also at a restart, when a device may be gone
    return start(node, command, progress, grace)


def _prepare(arguments: Sequence[str]) -> Any:
    """What to start, checked as far as every node can.

    Raises:
        ValueError: For mistakes, all of them.
    """
    if not arguments or not os.environ.get("NODES") or not os.environ.get("HEAD"):
        raise ValueError(f"CONFIG, NODES, HEAD: expected all of them; {USAGE}")
    if not Path(arguments[0]).is_file():
        raise ValueError(f"CONFIG: found no config {arguments[0]} in {Path.cwd()}")
    node = Node.of(os.environ)
    from torchtitan_ext.runs.run_files import complete_steps
    from torchtitan_ext.tools import launch, preflight_checks

    command = ["--job.config_file", *arguments]
    config, problems = preflight_checks.load(command)
    problems += preflight_checks.check(config, node.num_nodes * node.ranks)
    if problems:
        raise ValueError("\nerror: ".join(dict.fromkeys(problems)))
    folder = Path(config.dump_folder) / config.checkpoint.folder

    def progress() -> int:
        return max(complete_steps(folder), default=0)

    return node, ["-m", "torchtitan_ext.train", *command], progress, launch.grace(config)


def start(node: Node, command: Sequence[str], progress: Any, grace: int) -> int:
    """Start the ranks of a node, and whenever ranks of any node fail, again.

    Args:
        node: This one.
        command: Arguments of Python.
        progress: See :class:`torchtitan_ext.tools.agent.Agent`, as for ``grace``.
        grace: Seconds.

    Returns:
        The exit status, see the top.
    """
    import torch.distributed as dist
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    from torchtitan_ext.tools.agent import Agent, GivenUp, Logs

    meeting = RendezvousParameters(
        "c10d", node.head, node.run_id, node.num_nodes, node.num_nodes, timeout=900
    )
    try:
        handler = get_rendezvous_handler(meeting)
        spec = WorkerSpec(
            role="rank",
            local_world_size=node.ranks,
            entrypoint=sys.executable,
            args=("-u", *command),
            rdzv_handler=handler,
            max_restarts=node.max_restarts,
            monitor_interval=0.1,
        )
        agent = Agent(spec, Logs(node.logs), progress, grace)
        try:
            agent.run()
        except RendezvousError:  # closed by a node that gave up, or lost
            agent.raise_if_given_up()
            raise
    except GivenUp as error:
        if error.is_ours:
            handler.shutdown()  # nodes that wait for the next start end, too
        agent.leave()
        print(f"{error}; logs: {node.logs}", file=sys.stderr)
        return error.status
    except SignalException as error:
        return _stopped(agent.statuses, error.sigval)
    except (RendezvousError, dist.DistError) as error:
        print(f"error: no meeting of all nodes at {node.head}: {error}", file=sys.stderr)
        return train.FAILED
    handler.shutdown()
    return 0


def _stopped(statuses: Mapping[int, int | None], number: int) -> int:
    """The exit status where this process was told to stop, and a line about who was not done."""
    name = signal.Signals(number).name
    late = [rank for rank, status in sorted(statuses.items()) if status != 0]
    if not late:
        print(f"stopped by {name}; the same command goes on", file=sys.stderr)
        return 0
    print(f"error: stopped by {name}; ranks {late} did not end well in time", file=sys.stderr)
    return 128 + number


if __name__ == "__main__":
    sys.exit(main())
