"""Real gloo processes for tests, started once per world size and shared by many cases.

Ranks are forked from a process that has imported torch and trained once: an import takes seconds.

A case is a module-level function ``case(rank, world_size, *args)``. The ``run_on`` fixture runs it
on every rank of an initialised process group and gives the return values back, by rank:

    def sum_of_ranks(rank: int, world_size: int, start: int) -> int: ...

    def test_sum(run_on):
        assert run_on(4)(sum_of_ranks, 10) == [16, 16, 16, 16]

Warnings are errors on the ranks too. An exception that a case lets out costs the pool, and the
next case pays for a new one; where an error is expected on every rank, catch it inside
the case and return its text. Leave the ranks as you found them: same seed, same default dtype, no
collective under way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import set_debug_level_from_env

START_TIMEOUT = 120.0
"""Seconds for all ranks to import torch and to meet."""
CASE_TIMEOUT = 120.0
"""Seconds for one case; longer than gloo's own, whose error says where a rank was stuck."""
GLOO_TIMEOUT = 60.0
SETTLE_TIMEOUT = 20.0
"""Seconds for all ranks, idle by then, to meet after a case."""
MOST_GROUPS = 16
"""Process groups that ranks may collect before new ranks take their place. Threads of gloo wake for
each a hundred times a second, and after a hundred cases ranks would do little else."""
GRACE = 5.0
"""Seconds that the other ranks still have, once one has failed."""

Case = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Died:
    """Stands for the result of a rank that ended during a ``fresh`` case."""

    exitcode: int | None


class RankTraceback(Exception):
    """The traceback on the rank that failed first, and what became of the others."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"on rank {rank}:\n{text}")
        self.rank = rank


class RankDiedError(RuntimeError):
    """A rank ended in a case that did not expect it."""


@dataclasses.dataclass
class _Answer:
    """What one rank sends back for one case; ``when`` orders the failures of several ranks."""

    value: Any = None
    error: BaseException | None = None
    text: str = ""
    when: float = dataclasses.field(default_factory=time.monotonic)


def _meet_after_the_case(rank: int, world_size: int) -> int:
    """How many process groups there are."""
    # A collective that only some ranks entered hangs here, in its own case, not in the next one.
    dist.barrier()
    return len(dist.distributed_c10d._world.pg_map)


def _answer(payload: bytes, rank: int, world_size: int) -> bytes:
    """Runs one case; the answer is pickled here, so that an unpicklable one is an error too."""
    try:
        case, args = pickle.loads(payload)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            value = case(rank, world_size, *args)
        # Plain pickle, not Connection.send: torch would send tensors as handles to shared memory
        # of a process that may be gone when they are opened.
        return pickle.dumps(_Answer(value=value))
    except BaseException as error:
        text = traceback.format_exc()
        try:
            answer = pickle.dumps(_Answer(error=error, text=text))
            pickle.loads(answer)  # some exceptions pickle, but do not come back
            return answer
        except Exception:
            return pickle.dumps(_Answer(error=RuntimeError(repr(error)), text=text))


def _serve(
    connection: Connection, rank: int, world_size: int, directory: str, environment: dict[str, str]
) -> None:
    """The life of a rank: meet the others, answer cases until told to stop."""
    # A fork has the environment of the process that it comes from, as it was when that started.
    os.environ.clear()
    os.environ.update(environment)
    set_debug_level_from_env()
    torch.set_num_threads(1)
    with open(Path(directory, f"stack{rank}"), "w") as stack:
        # Written by a C handler: it works in a rank stuck inside a collective.
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{directory}/store",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=GLOO_TIMEOUT),
        )
        connection.send_bytes(pickle.dumps(_Answer()))
        # EOFError: the test process is gone, and so should this one be.
        with contextlib.suppress(EOFError):
            while payload := connection.recv_bytes():
                connection.send_bytes(_answer(payload, rank, world_size))
        dist.destroy_process_group()
        faulthandler.unregister(signal.SIGUSR1)


class Pool:
    """``world_size`` processes in one gloo group; they meet through a file, without ports."""

    def __init__(self, world_size: int, directory: Path) -> None:
        self.world_size = world_size
        self.broken = False
        self.is_worn = False
        self._directory = directory
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._busy = set(range(world_size))
        for rank in range(world_size):
            self._start(rank)
        try:
            self._gather("start-up", START_TIMEOUT)
        except BaseException:
            self.stop()
            raise

    def _start(self, rank: int) -> None:
        context = multiprocessing.get_context("forkserver")
        # The same as in `tests.faults`: there is one such server for all tests.
        context.set_forkserver_preload(["tests.faults.warm"])
        loopback = "lo" if sys.platform == "linux" else "lo0"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback}
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_serve,
            args=(theirs, rank, self.world_size, str(self._directory), environment),
            name=f"rank {rank} of {self.world_size}",
            daemon=True,
        )
        process.start()
        theirs.close()  # or the end of the process would not end the connection
        self._processes.append(process)
        self._connections.append(ours)

    @property
    def pids(self) -> list[int | None]:
        """The process id of each rank."""
        return [process.pid for process in self._processes]

    def run(
        self, case: Case, *args: Any, timeout: float = CASE_TIMEOUT, deaths: bool = False
    ) -> list[Any]:
        """Runs ``case(rank, world_size, *args)`` on every rank.

        Args:
            case: A function that the ranks can import.
            *args: Picklable arguments.
            timeout: Seconds for the whole case.
            deaths: Whether ranks may end; their result is then ``Died``.

        Returns:
            The return values, by rank.

        Raises:
            Exception: What the first rank to fail raised, caused by a ``RankTraceback``.
            RankDiedError: A rank ended.
            TimeoutError: Some ranks did not answer in time; names them, with their stacks.
        """
        values = self._call(case, args, timeout, deaths)
        if not self.broken:
            found = self._call(_meet_after_the_case, (), SETTLE_TIMEOUT, deaths=False)
            self.is_worn = max(found) > MOST_GROUPS
        return values

    def _call(self, case: Case, args: Any, timeout: float, deaths: bool) -> list[Any]:
        payload = pickle.dumps((case, args))
        self._busy = set(range(self.world_size))
        for connection in self._connections:
            # A rank that ended since the last case shows when its answer is read.
            with contextlib.suppress(BrokenPipeError):
                connection.send_bytes(payload)
        return self._gather(case.__name__, timeout, deaths)

    def _gather(self, what: str, timeout: float, deaths: bool = False) -> list[Any]:
        self.broken = True
        answers = self._receive(timeout, deaths)
        failed = [rank for rank, answer in answers.items() if answer.error is not None]
        if failed:
            first = min(failed, key=lambda rank: answers[rank].when)
            error = answers[first].error
            assert error is not None
            raise error from RankTraceback(first, self._report(first, answers))
        if self._busy:
            raise TimeoutError(
                f"{what}: no answer within {timeout:g} s from ranks {sorted(self._busy)} "
                f"of {self.world_size}\n{self._stacks()}"
            )
        self.broken = any(isinstance(answer.value, Died) for answer in answers.values())
        return [answers[rank].value for rank in range(self.world_size)]

    def _receive(self, timeout: float, deaths: bool) -> dict[int, _Answer]:
        """Answers until all are there, the time is up, or a failure is ``GRACE`` seconds old."""
        answers: dict[int, _Answer] = {}
        deadline = time.monotonic() + timeout
        while self._busy:
            pending = {self._connections[rank]: rank for rank in sorted(self._busy)}
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = pending[connection]  # type: ignore[index]
                answers[rank] = self._receive_one(rank, deaths)
                self._busy.discard(rank)
                if answers[rank].error is not None:
                    deadline = min(deadline, time.monotonic() + GRACE)
        return answers

    def _receive_one(self, rank: int, deaths: bool) -> _Answer:
        try:
            answer = pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(GRACE)
            exitcode = self._processes[rank].exitcode
            if deaths:
                return _Answer(value=Died(exitcode))
            return _Answer(error=RankDiedError(f"rank {rank} ended with exit code {exitcode}"))
        assert isinstance(answer, _Answer)
        return answer

    def _report(self, first: int, answers: dict[int, _Answer]) -> str:
        lines = [answers[first].text]
        for rank in range(self.world_size):
            if rank in self._busy:
                lines.append(f"rank {rank} had no answer yet")
            elif rank != first and answers[rank].error is not None:
                lines.append(f"rank {rank} failed later: {answers[rank].error!r}")
        return "\n".join(lines)

    def _stacks(self) -> str:
        """Where the ranks that did not answer are."""
        for rank in self._busy:
            process = self._processes[rank]
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)  # the handlers write; nothing depends on how much arrives
        files = ((rank, self._directory / f"stack{rank}") for rank in sorted(self._busy))
        return "\n".join(f"rank {rank}: {file.read_text()}" for rank, file in files)

    def stop(self) -> None:
        """Ends all ranks: those that wait for a case by themselves, the others by signal."""
        for rank, connection in enumerate(self._connections):
            if rank not in self._busy:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    connection.send_bytes(b"")
        for rank, process in enumerate(self._processes):
            if rank not in self._busy:
                process.join(GRACE)  # long enough to write its coverage
        for end in (BaseProcess.terminate, BaseProcess.kill):
            alive = [process for process in self._processes if process.is_alive()]
            for process in alive:
                end(process)
            for process in alive:
                process.join(2.0)
        for connection in self._connections:
            connection.close()


class Ranks:
    """The pools of a test session; the ``run_on`` fixture is one of these."""

    def __init__(self, make_directory: Callable[[], Path]) -> None:
        self._make_directory = make_directory
        self._pools: dict[int, Pool] = {}

    def __call__(
        self, world_size: int, *, timeout: float = CASE_TIMEOUT, fresh: bool = False
    ) -> Callable[..., list[Any]]:
        """Chooses where the next case runs.

        Args:
            world_size: Number of ranks.
            timeout: Seconds for the case; the ranks of a case that takes longer are killed.
            fresh: Use processes of its own, which the case may kill; a rank that ended gives
                ``Died`` as its result.

        Returns:
            ``run(case, *args) -> list``, see ``Pool.run``.
        """

        def run(case: Case, *args: Any) -> list[Any]:
            pool = self._take(world_size, fresh)
            try:
                return pool.run(case, *args, timeout=timeout, deaths=fresh)
            finally:
                if not (fresh or pool.broken or pool.is_worn):
                    self._pools[world_size] = pool
                else:
                    pool.stop()

        return run

    def _take(self, world_size: int, fresh: bool) -> Pool:
        pool = None if fresh else self._pools.pop(world_size, None)
        return pool or Pool(world_size, self._make_directory())

    def close(self) -> None:
        """Ends all processes."""
        while self._pools:
            self._pools.popitem()[1].stop()
