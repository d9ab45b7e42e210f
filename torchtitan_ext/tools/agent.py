"""torchrun's agent for one node of several, which tells a user's mistake from a failure.

Where ranks end with the status of a mistake nothing is started again. A start that has saved a new
checkpoint may fail as often as the first one. A node that gives up tells the others why: they would
wait for its ranks, or report that they lost them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from torchtitan_ext import train
from torchtitan_ext.tools import launch

_GIVEN_UP, _HEARD = "given up", "heard"
"""Keys of the store that the agents share."""

_CONSEQUENCE_SECONDS = 1.0
"""Ranks whose peers have failed fail, too: after this long the node of those has told."""

_HEARD_SECONDS = 20.0
"""The longest wait until all nodes know why they end."""


class GivenUp(Exception):
    """Training has ended for good.

    Attributes:
        status: Exit status of the launcher.
        is_ours: Whether this node has decided so, and not heard of it.
    """

    def __init__(self, reason: str, status: int, is_ours: bool = True) -> None:
        super().__init__(reason)
        self.status, self.is_ours = status, is_ours


class Agent(LocalElasticAgent):
    """Starts the ranks of a node, watches them, and starts them again.

    Args:
        spec: Of the ranks.
        logs: See :class:`Logs`.
        progress: Step of the newest checkpoint. More of it refills the budget of restarts.
        grace: Seconds that ranks have to end once this process was told to stop.
    """

    def __init__(self, spec: Any, logs: Logs, progress: Callable[[], int], grace: int) -> None:
        super().__init__(
            spec, logs, shutdown_timeout=grace, log_line_prefix_template="[rank${rank}]: "
        )
        self._store: Any = None  # from the first meeting on
        self._progress = progress
        self._reached = progress()
        self.statuses: dict[int, int | None] = {}
        """Exit status by rank, once they were shut down."""

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state is WorkerState.HEALTHY:
            self.raise_if_given_up()
        elif result.state is WorkerState.FAILED:
            self._judge(result)
        return result

    def _judge(self, result: RunResult) -> None:
        """Decide whether ranks that failed are started again.

        Raises:
            GivenUp: If they are not.
        """
        failures = [
            {"rank": str(rank), "exitcode": str(one.exitcode), "error_file": one.error_file}
            for rank, one in sorted(result.failures.items())
        ]
        is_mistake = any(one.exitcode == train.USER_ERROR for one in result.failures.values())
        if not is_mistake:
            time.sleep(_CONSEQUENCE_SECONDS)
            self.raise_if_given_up()
        if (reached := self._progress()) > self._reached:
            self._reached = reached
            self._remaining_restarts = self._worker_group.spec.max_restarts
        if is_mistake or not self._remaining_restarts:
            reason = launch.reason_of(failures)
            status = train.USER_ERROR if is_mistake else train.FAILED
            told = {"reason": reason, "status": status, "host": socket.gethostname()}
            self._store.set(_GIVEN_UP, json.dumps(told))
            raise GivenUp(reason, status)

    def raise_if_given_up(self) -> None:
        """Hear what another node has told.

        Raises:
            GivenUp: If it gave up.
        """
        if self._store is None or not self._store.check([_GIVEN_UP]):
            return
        told = json.loads(self._store.get(_GIVEN_UP))
        self._shutdown()  # their peers are gone: they cannot save
        raise GivenUp(f"{told['reason']} (on {told['host']})", told["status"], is_ours=False)

    def leave(self) -> None:
        """Wait until all nodes know why they end: one of them holds the store."""
        end = time.monotonic() + _HEARD_SECONDS
        with contextlib.suppress(dist.DistError):  # it knows, and has left
            self._store.add(_HEARD, 1)
            num_nodes = self._worker_group.group_world_size or 1
            while self._store.add(_HEARD, 0) < num_nodes and time.monotonic() < end:
                time.sleep(0.1)

    def _shutdown(self, death_sig: Any = signal.SIGTERM, timeout: int = 30) -> None:
        super()._shutdown(death_sig, timeout)
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        ranks = [worker.global_rank for worker in self._worker_group.workers]
        self.statuses = {ranks[local]: one.proc.poll() for local, one in handlers.items()}


class Logs(LogsSpecs):
    """Where ranks write: ``<folder>/<host>-rank<r>/<start>``.

    There lie ``stdout.log``, ``stderr.log`` and ``error.json``. Starts are counted on from those in
    the folder. What the first rank of the node writes is shown as well.

    Args:
        folder: Made where it is missing.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self._folder = folder

    @property
    def root_log_dir(self) -> str:
        """The folder."""
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """The files of each local rank, for the environments of a start."""
        host = socket.gethostname().partition(".")[0]
        folders = {
            local: _next_start(self._folder / f"{host}-rank{env['RANK']}")
            for local, env in envs.items()
        }
        files = LogsDest(
            stdouts={local: str(folder / "stdout.log") for local, folder in folders.items()},
            stderrs={local: str(folder / "stderr.log") for local, folder in folders.items()},
            error_files={local: str(folder / "error.json") for local, folder in folders.items()},
        )
        files.tee_stdouts[0], files.tee_stderrs[0] = files.stdouts[0], files.stderrs[0]
        for local, env in envs.items():
            env["TORCHELASTIC_ERROR_FILE"] = files.error_files[local]
        return files


def _next_start(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number in itertools.count():
        made = folder / str(number)
        try:
            made.mkdir()
        except FileExistsError:
            continue
        return made
    raise AssertionError
