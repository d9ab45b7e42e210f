"""Sequences read and tokenized ahead of the step, in processes of PyTorch's ``DataLoader``.

Each sequence carries the position of its stream after it. What a checkpoint holds is therefore the
position of what training drew, however far ahead the processes are, and their number changes
nothing. (torchdata's stateful loader saves the positions of its processes themselves: a resume
would need as many of them.)
"""

from __future__ import annotations

import array
import contextlib
import functools
import heapq
import itertools
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from torchtitan_ext.data.files import DataError
from torchtitan_ext.data.streams import DealtStream


class Drawn(NamedTuple):
    """A sequence on its way to a batch.

    Attributes:
        turn: Sequences that its stream gave before.
        number: Of the stream.
        state: The stream's position after it.
        tokens: Integers of 32 bits.
    """

    turn: int
    number: int
    state: str
    tokens: bytes


def draw(streams: Sequence[DealtStream]) -> Iterator[Drawn]:
    """Sequences, each of the least advanced stream, until all have ended."""
    heap = [(stream.num_sequences, stream.number, stream) for stream in streams]
    heapq.heapify(heap)  # numbers differ, and streams are never compared
    while heap:
        turn, number, stream = heap[0]
        if (row := next(stream, None)) is None:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (stream.num_sequences, number, stream))
            yield Drawn(turn, number, stream.state(), array.array("i", row).tobytes())


@dataclass(frozen=True, slots=True)
class Depth:
    """How far ahead to read.

    Attributes:
        num_workers: Processes.
        turns: Sequences of each stream that a process hands over at once.
        prefetch: How often each may do so before training draws them.
        start_seconds: The longest wait for the first sequences; 0 for any.
        seconds: The longest wait for the next documents of a stream; 0 for any.
    """

    num_workers: int
    turns: int = 1
    prefetch: int = 2
    start_seconds: float = 0.0
    seconds: float = 0.0

    @classmethod
    def of(
        cls, num_workers: int, num_streams: int, batch: int, ahead: int, prefetch: int | None
    ) -> Depth:
        """The depth for a rank.

        Args:
            num_workers: Processes asked for; those that would have no stream are not started.
            num_streams: Of this rank.
            batch: Sequences of a batch, about as many as are handed over at once.
            ahead: Sequences to have ready.
            prefetch: Batches to have ready instead, where it is given.
        """
        turns = -(-batch // num_streams)
        needed = -(-ahead // (turns * num_streams)) if prefetch is None else prefetch
        return cls(min(num_workers, num_streams), turns, max(2, needed))


def draw_ahead(
    streams: Sequence[DealtStream], states: Mapping[int, str], depth: Depth
) -> Iterator[Drawn]:
    """What :func:`draw` gives, read by other processes.

    Args:
        streams: Stay where they are: each process has copies of its own.
        states: Position to begin at, by number of the stream.
        depth: How far to read ahead.

    Raises:
        ValueError: As the streams do.
        DataError: If what they read cannot be read any more, or takes too long.
        RuntimeError: If a process is killed.
    """
    first = min(stream.position_of(states[stream.number]).num_sequences for stream in streams)
    shares = DataLoader(
        _Shares(streams, states, first, depth),
        batch_size=None,
        num_workers=depth.num_workers,
        prefetch_factor=depth.prefetch,
        timeout=depth.start_seconds,
        collate_fn=_same,
        worker_init_fn=_end_with_training,
        # The streams need not be pickled, nor files mapped anew.
        multiprocessing_context="fork",
        # Without one it draws from the generator that training draws from.
        generator=torch.Generator(),
    )
    # Blocked in all threads of the processes, those too that libraries (Arrow) start as they fork.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        arrived = iter(shares)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    while True:
        try:
            # The loader takes turns among its processes.
            found = list(itertools.islice(arrived, depth.num_workers))
        except RuntimeError as error:
            if "timed out" not in str(error):
                raise
            raise DataError(_too_long(depth.start_seconds, "init")) from None
        for share in found:
            if isinstance(share, Exception):
                raise share
        rows = [share for share in found if share is not None]
        if not rows:
            return
        yield from heapq.merge(*rows)


def _same(share: Any) -> Any:
    return share


class _Shares(IterableDataset[Any]):
    """What each process reads: the next ``turns`` sequences of its streams, again and again.

    An empty list where streams are ahead of others, ``None`` for ever when they have ended.
    """

    def __init__(
        self, streams: Sequence[DealtStream], states: Mapping[int, str], first: int, depth: Depth
    ) -> None:
        self._streams = streams
        self._states = states
        self._first = first
        self._depth = depth

    def __iter__(self) -> Iterator[list[Drawn] | Exception | None]:
        worker = get_worker_info()
        assert worker is not None
        try:
            yield from self._read(self._streams[worker.id :: worker.num_workers])
        except (ValueError, DataError) as error:  # told in one line, and not as a traceback
            yield error
        yield from itertools.repeat(None)

    def _read(self, mine: Sequence[DealtStream]) -> Iterator[list[Drawn]]:
        reader = Reader(self._depth.seconds)
        for stream in mine:
            stream.read_ahead(reader.submit)
            stream.load_state(self._states[stream.number])
        num_given = 0
        for at, rows in itertools.groupby(draw(mine), self._share_of):
            yield from ([] for _ in range(at - num_given))
            yield list(rows)
            num_given = at + 1

    def _share_of(self, row: Drawn) -> int:
        return (row.turn - self._first) // self._depth.turns


class Reader:
    """A thread that does what it is given, one thing after another.

    Unlike an executor's it does not hold up the end of its process.

    Args:
        seconds: The longest wait for a result; 0 for any.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def submit(self, task: Callable[[], Any]) -> Callable[[], Any]:
        """Have ``task`` done; the result waits for its result or exception.

        Raises:
            DataError: By the result, if that takes too long.
        """
        future: Future[Any] = Future()
        self._tasks.put((future, task))
        return functools.partial(self._wait, future)

    def _wait(self, future: Future[Any]) -> Any:
        with contextlib.suppress(TimeoutError):
            return future.result(self._seconds or None)
        if future.done():
            return future.result()
        raise DataError(_too_long(self._seconds, "train"))

    def _work(self) -> None:
        while True:
            future, task = self._tasks.get()
            try:
                future.set_result(task())
            except BaseException as error:
                future.set_exception(error)


def _too_long(seconds: float, phase: str) -> str:
    return (
        f"data: waited {seconds:.0f} s for documents, see the warnings in the logs of all ranks; a "
        "restart goes on from the last checkpoint. Ranks wait hardly longer for each other: "
        f"comm.{phase}_timeout_seconds"
    )


def _end_with_training(_: int) -> None:
    """Leave signals to the process of training, which saves before it ends, and end with it.

    A process that outlived a killed one would hold its folder, its port and its device's memory.
    SIGTERM is blocked here, and taken by a thread alone.
    """
    parent = os.getppid()
    signal.set_wakeup_fd(-1)  # that of the trainer, which would take our signals for its own
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            found = signal.sigtimedwait({signal.SIGTERM}, 1.0)
            if found is not None and found.si_pid == parent:  # as the loader ends its processes
                break
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
