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
import datetime
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from amo_dist.optimizers import muon

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
"""Seconds that the other ranks still have, once one has ended."""

Case = Callable[..., Any]


def compute_in_float32() -> None:
    """Have ``ns_dtype = "auto"`` take float32 in this process, as on a CPU without bfloat16.

    What tests compare would depend on the machine otherwise.
    """
    muon.has_bfloat16 = lambda device: device.type != "cpu"  # type: ignore[attr-defined]


def raised(function: Callable[[], object]) -> str:
    """Kind and text of the error that a function raises, or nothing."""
    try:
        function()
    except (RuntimeError, ValueError, FloatingPointError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


class RankTraceback(Exception):
    """The traceback of an exception on its rank."""


def _meet_after_the_case(rank: int, world_size: int) -> int:
    """How many process groups there are."""
    # A collective that only some ranks entered hangs here, in its own case, not in the next one.
    dist.barrier()
    return len(dist.distributed_c10d._world.pg_map)


def _answer(payload: bytes, rank: int, world_size: int) -> bytes:
    """Runs one case; returns its value, its exception and the traceback, pickled.

    An answer that cannot be pickled is an error, too. Plain pickle, not Connection.send: torch
    would send tensors as handles to shared memory of a process that may be gone when they are
    opened.
    """
    try:
        case, args = pickle.loads(payload)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            value = case(rank, world_size, *args)
        return pickle.dumps((value, None, ""))
    except BaseException as error:
        text = traceback.format_exc()
        try:
            answer = pickle.dumps((None, error, text))
            pickle.loads(answer)  # some exceptions pickle, but do not come back
            return answer
        except Exception:
            return pickle.dumps((None, RuntimeError(repr(error)), text))


def _serve(connection: Connection, rank: int, world_size: int, folder: str) -> None:
    """The life of a rank: meet the others, answer cases until the pool stops."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    torch.set_num_threads(1)
    compute_in_float32()
    with open(Path(folder, f"stack{rank}"), "w") as stack:
        # Written by a C handler: it works in a rank stuck inside a collective.
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=GLOO_TIMEOUT),
        )
        connection.send_bytes(pickle.dumps((None, None, "")))
        # EOFError: the test process is gone, and so should this one be.
        with contextlib.suppress(EOFError):
            while payload := connection.recv_bytes():
                connection.send_bytes(_answer(payload, rank, world_size))
        dist.destroy_process_group()
        faulthandler.unregister(signal.SIGUSR1)


class Pool:
    """``world_size`` processes in one gloo group; they meet through a file, without ports."""

    def __init__(self, world_size: int) -> None:
        self.is_broken = self.is_worn = False
        self._folder = tempfile.TemporaryDirectory()
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.faults.warm"])
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, world_size, self._folder.name)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()  # or the end of the process would not end the connection
            self._processes.append(process)
            self._connections.append(ours)
        try:
            self._gather("start-up", START_TIMEOUT)
        except BaseException:
            self.stop()
            raise

    def run(self, case: Case, *args: Any, deaths: bool = False) -> list[Any]:
        """Runs ``case(rank, world_size, *args)`` on every rank.

        Args:
            case: A function that the ranks can import.
            *args: Picklable arguments.
            deaths: Whether ranks may end. Their results are None, and so are those of ranks that
                fail of it, or give no answer within ``GRACE`` seconds.

        Returns:
            The return values, by rank.

        Raises:
            Exception: The exception of the first rank to fail, caused by a ``RankTraceback``.
            RuntimeError: A rank ended.
            TimeoutError: Some ranks did not answer in time; names them, with their stacks.
        """
        values = self._call(case, args, CASE_TIMEOUT, deaths)
        if not self.is_broken:
            self.is_worn = max(self._call(_meet_after_the_case, (), SETTLE_TIMEOUT)) > MOST_GROUPS
        return values

    def _call(self, case: Case, args: Any, timeout: float, deaths: bool = False) -> list[Any]:
        payload = pickle.dumps((case, args))
        for connection in self._connections:
            # A rank that ended since the last case shows when its answer is read.
            with contextlib.suppress(BrokenPipeError):
                connection.send_bytes(payload)
        return self._gather(case.__name__, timeout, deaths)

    def _gather(self, what: str, timeout: float, deaths: bool = False) -> list[Any]:
        """The answers of all ranks to what they were asked, by rank."""
        self.is_broken = True
        busy = set(range(len(self._processes)))
        values: list[Any] = [None] * len(self._processes)
        failure: BaseException | None = None
        cause: RankTraceback | None = None
        has_died = False
        deadline = time.monotonic() + timeout
        while busy and (failure is None or deaths):
            pending = [self._connections[rank] for rank in busy]
            ready = wait(pending, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in [rank for rank in busy if self._connections[rank] in ready]:
                busy.remove(rank)
                try:
                    received = self._connections[rank].recv_bytes()
                    values[rank], error, text = pickle.loads(received)
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(GRACE)
                    exitcode = self._processes[rank].exitcode
                    error = RuntimeError(f"{what}: rank {rank} ended with exit code {exitcode}")
                    text, has_died = "", True
                if error is not None:
                    deadline = min(deadline, time.monotonic() + GRACE)
                    failure = failure or error
                    cause = cause or RankTraceback(f"on rank {rank}:\n{text}")
        if failure is not None and not (deaths and has_died):
            raise failure from cause
        if busy and not has_died:
            raise TimeoutError(
                f"{what}: no answer within {timeout:g} s from ranks {sorted(busy)} "
                f"of {len(values)}\n{self._stacks(sorted(busy))}"
            )
        self.is_broken = has_died
        return values

    def _stacks(self, ranks: Sequence[int]) -> str:
        """The stacks of ranks that did not answer."""
        for rank in ranks:
            process = self._processes[rank]
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)  # the handlers write; nothing depends on how much arrives
        files = ((rank, Path(self._folder.name, f"stack{rank}")) for rank in ranks)
        return "\n".join(f"rank {rank}: {file.read_text()}" for rank, file in files)

    def stop(self) -> None:
        """Ends all ranks: by themselves where nothing failed, else by signal."""
        if not self.is_broken:
            for connection in self._connections:
                with contextlib.suppress(BrokenPipeError):
                    connection.send_bytes(b"")
            for process in self._processes:
                process.join(GRACE)  # long enough to write its coverage
        for process in self._processes:
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        self._folder.cleanup()


class Ranks:
    """The pools of a test session; the ``run_on`` fixture is one of these."""

    def __init__(self) -> None:
        self._pools: dict[int, Pool] = {}

    def __call__(self, world_size: int, *, fresh: bool = False) -> Callable[..., list[Any]]:
        """Chooses where the next case runs.

        Args:
            world_size: Number of ranks.
            fresh: Use processes of its own, which the case may kill; a rank that ended gives None
                as its result.

        Returns:
            ``run(case, *args) -> list``, see ``Pool.run``.
        """

        def run(case: Case, *args: Any) -> list[Any]:
            pool = None if fresh else self._pools.pop(world_size, None)
            pool = pool or Pool(world_size)
            try:
                return pool.run(case, *args, deaths=fresh)
            finally:
                if fresh or pool.is_broken or pool.is_worn:
                    pool.stop()
                else:
                    self._pools[world_size] = pool

        return run

    def close(self) -> None:
        """Ends all processes."""
        while self._pools:
            self._pools.popitem()[1].stop()
