"""Files to shards of tokens: in several processes, and on from where a killed run stopped.

One process reads rows and writes shards, in the order of the files; the others make tokens of
batches of rows. So the bytes do not depend on the number of processes, nor on where a run was
killed.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import fcntl
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from torchtitan_ext.data.files import DataError, Files
from torchtitan_ext.data.rows import BadRow, BadRows, Raw, judge, read_rows
from torchtitan_ext.data.shards import (
    COMMIT,
    DOCUMENT,
    INDEX,
    Index,
    Tokens,
    read_index,
    token_type,
    write_index,
    write_shard,
)
from torchtitan_ext.runs.differences import differences
from torchtitan_ext.signals import end_with_parent

logger = logging.getLogger(__name__)

BATCH = 2**20
"""Bytes of rows that a process gets at a time, or one row."""
PROCESS_BYTES = 2**25
"""Bytes of files for which one more process is worth its start."""


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """How to tokenize.

    Attributes:
        text_field: Field of a row that holds the text.
        score_field: Field that holds the score, a finite number; empty reads none.
        max_bad_rows: Largest share of rows without text (or score) that are left out.
        shard_tokens: Tokens of a shard, about: the most that a killed run loses.
        part: Number of the part to make, from 0.
        num_parts: Parts that the files are dealt to.
    """

    text_field: str = "text"
    score_field: str = ""
    max_bad_rows: float = 0.01
    shard_tokens: int = 2**26
    part: int = 0
    num_parts: int = 1

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields to read of each row."""
        return (self.text_field, self.score_field) if self.score_field else (self.text_field,)


Encoded = tuple[Tokens, Tokens, list[tuple[int, str]]]
"""Tokens of a batch, its documents, and the bad rows: which of the batch, and why."""

_here: dict[str, Any] = {}
"""``tokenizer``, in a process that makes tokens."""


def _start(tokenizer: Any, parent: int) -> None:
    end_with_parent(parent)  # A killed parent would leave this process waiting for more rows.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process is a thread here
    _here["tokenizer"] = tokenizer


def _encode(rows: list[Raw], fields: tuple[str, ...], type_: str) -> Encoded:
    tokenizer = _here["tokenizer"]
    pieces, documents, bad = [np.empty(0, type_)], [], []
    for number, row in enumerate(rows):
        try:
            text, score = judge(row, fields)
        except BadRow as error:
            bad.append((number, str(error)))
            continue
        pieces.append(np.asarray(tokenizer.encode(text, add_bos=False, add_eos=True), type_))
        documents.append((len(pieces[-1]), score))
    return np.concatenate(pieces), np.array(documents, DOCUMENT), bad


@dataclasses.dataclass(frozen=True, slots=True)
class _Batch:
    """Rows that one process makes tokens of; ``places`` are their files and numbers."""

    rows: list[Raw]
    places: list[tuple[int, int]]
    end: list[int]


def _batches(files: Files, fields: tuple[str, ...], position: list[int]) -> Iterator[_Batch]:
    """All rows from a position on; where batches end depends on the rows alone."""
    rows: list[Raw] = []
    places: list[tuple[int, int]] = []
    size = 0
    for file in range(position[0], len(files.urls)):
        first = position[1] if file == position[0] else 0
        for number, row in read_rows(files.urls[file], fields, first):
            rows.append(row)
            places.append((file, number))
            text = row if isinstance(row, bytes) else row[0]
            size += 64 + (len(text) if isinstance(text, (bytes, str)) else 0)
            if size >= BATCH:
                yield _Batch(rows, places, [file, number + 1])
                rows, places, size = [], [], 0
    if rows:
        yield _Batch(rows, places, [len(files.urls), 0])


def tokenize(
    files: Files, tokenizer: Any, output: Path, options: Options | None = None, processes: int = 0
) -> Iterator[tuple[int, Index]]:
    """Write the shards of one part, and go on where an earlier run stopped.

    Args:
        files: The corpus.
        tokenizer: Tokenizer, which other processes get a copy of.
        output: Folder of all parts.
        options: How to tokenize.
        processes: Processes that make tokens; 0 for as many as there are cores and work for. With
            one, this process makes them.

    Yields:
        Number of tokens so far, and the index, now and then; first those of an earlier run.

    Raises:
        ValueError: If the folder holds shards of other settings, for what cannot be read, or for
            too many bad rows.
        DataError: If the hub does not serve for minutes, or a process that makes tokens dies.
    """
    options = options or Options()
    own_files = dataclasses.replace(files, urls=files.urls[options.part :: options.num_parts])
    settings = _settings(files, tokenizer, options)
    folder = output
    if options.num_parts > 1:
        folder = output / f"part_{options.part:05d}_of_{options.num_parts:05d}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a") as lock:
        _claim(lock, folder)
        index = read_index(folder) or Index(settings)
        if changed := differences(index.settings, settings):
            raise ValueError(
                f"{folder / INDEX}: was made with other settings ({'; '.join(changed)})"
            )
        bad = BadRows(options.max_bad_rows, index.num_rows, index.bad_rows)
        yield index.num_tokens, index
        if index.complete:
            bad.check(at_end=True)
            return
        try:
            with _executor(tokenizer, own_files, processes) as executor:
                yield from _shards(own_files, folder, index, bad, options, executor)
        except BrokenProcessPool:
            raise DataError(
                f"{folder}: a process that makes tokens was killed; memory may have run out. "
                "The same command goes on after the last shard; fewer --processes need less memory"
            ) from None


def _claim(lock: TextIO, folder: Path) -> None:
    """Wait until no other process writes into the folder."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        logger.warning("%s: waiting for another process that tokenizes into it", folder)
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:  # some file systems of networks know no locks: then there is no guard
        pass


def _settings(files: Files, tokenizer: Any, options: Options) -> dict[str, Any]:
    """Settings that decide the tokens."""
    from torchtitan_ext.data.tokenizers import identity

    return {
        "documents": files.digest,
        "tokenizer": identity(tokenizer),
        "token_type": token_type(tokenizer.get_vocab_size()),
        "text_field": options.text_field,
        "score_field": options.score_field,
        "part": [options.part, options.num_parts],
        **({COMMIT: files.commit} if files.commit else {}),
    }


def _executor(tokenizer: Any, files: Files, processes: int) -> Executor:
    if not processes:
        size = sum(0 if "://" in url else os.path.getsize(url) for url in files.urls)
        remote = any("://" in url for url in files.urls)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        processes = cores if remote else min(cores, size // PROCESS_BYTES)
    if processes < 2:
        return ThreadPoolExecutor(1, initializer=_here.update, initargs=({"tokenizer": tokenizer},))
    # Forked, processes would share the state of threads that they do not have.
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(processes, context, _start, (tokenizer, os.getpid()))


def _shards(
    files: Files, folder: Path, index: Index, bad: BadRows, options: Options, executor: Executor
) -> Iterator[tuple[int, Index]]:
    tokens: list[Tokens] = []
    documents: list[Tokens] = []
    batches = _batches(files, options.fields, index.position)
    type_ = index.settings["token_type"]
    for batch, encoded in _in_order(batches, executor, options.fields, type_):
        for number, reason in encoded[2]:
            file, row = batch.places[number]
            bad.add(f"{files.urls[file]}, row {row + 1}", reason)
        bad.num_rows += len(batch.rows)
        bad.check()
        tokens.append(encoded[0])
        documents.append(encoded[1])
        index.position = batch.end
        size = sum(map(len, tokens))
        yield index.num_tokens + size, index
        if size >= options.shard_tokens:
            _write(folder, index, bad, tokens, documents)
            tokens, documents = [], []
    bad.check(at_end=True)
    index.complete = True
    _write(folder, index, bad, tokens, documents)
    yield index.num_tokens, index


def _write(
    folder: Path, index: Index, bad: BadRows, tokens: list[Tokens], documents: list[Tokens]
) -> None:
    if any(map(len, tokens)):
        write_shard(folder, index, tokens, documents if index.settings["score_field"] else ())
    index.num_rows, index.bad_rows = bad.num_rows, dict(bad.counts)
    write_index(folder, index)


def _in_order(
    batches: Iterator[_Batch], executor: Executor, fields: tuple[str, ...], type_: str
) -> Iterator[tuple[_Batch, Encoded]]:
    """Batches with their tokens; a few are under way at a time."""
    pending: collections.deque[tuple[_Batch, Future[Encoded]]] = collections.deque()
    try:
        for batch in batches:
            with _interrupts_held():
                future = executor.submit(_encode, batch.rows, fields, type_)
            pending.append((batch, future))
            if len(pending) > 2 * (os.cpu_count() or 1):
                first, future = pending.popleft()
                yield first, future.result()
        for batch, future in pending:
            yield batch, future.result()
    finally:
        for _, future in pending:
            future.cancel()


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back, so that a process started meanwhile never gets it.

    A terminal sends it to all processes; each would print a traceback beside this one's line.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


LOG_SECONDS = 30.0
"""Seconds between lines of progress where no one looks at a terminal."""


def with_bar(shards: Iterator[tuple[int, Index]], name: str) -> Index:
    """Show progress while shards are written; returns the last index.

    A terminal gets one line that changes, everything else a line now and then.
    """
    count, index = next(shards)
    if sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status(_describe(name, count, index)) as status:
            for count, index in shards:
                status.update(_describe(name, count, index))
        return index
    last = time.monotonic()
    for count, index in shards:
        if time.monotonic() - last > LOG_SECONDS:
            last = time.monotonic()
            print(_describe(name, count, index), file=sys.stderr, flush=True)
    return index


def _describe(name: str, num_tokens: int, index: Index) -> str:
    return f"tokenizing {name}: {num_tokens:,} tokens, {index.position[0]} files done"
