"""Rows of files: read from any position on, judged one by one, and dealt to streams.

``datasets`` decodes whole batches, and one bad value fails a batch without naming its row. Here
each row is decoded by itself, so that a bad one can be counted, named and left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torchtitan_ext.data.files import DataError, format_of

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

PLAIN_LINES = (".jsonl", ".ndjson")
"""Suffixes of JSON lines that are not compressed."""

RETRIES = 9
"""Times that a remote file is opened again before a row comes: after 2, 4, 8 ... seconds, a minute
at most, and five in all, which is how long the hub counts requests."""

Values = tuple[object, ...]
"""Values of the fields asked for, ``None`` where one is missing; text may be undecoded bytes."""

Place = tuple[int, int]
"""Where reading goes on: index of a part, and the next row of its file, or byte."""

Row = tuple[Place, str, int, Any]
"""The place after a row, its file and unit, its number, and what :func:`read_rows` yields."""


class BadRow(Exception):
    """A row without usable text; the message is the reason, one of a few."""


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """What a stream reads of a file: rows ``first, first + stride, ...``.

    Attributes:
        file: Number of the file.
        first: From 0 to ``stride - 1``.
        stride: Parts of the file.
        is_range: Whether it is the ``first`` of ``stride`` equal ranges instead, where the format
            leads to them: ranges of rows in parquet, of bytes in JSON lines as they are. What is
            compressed and Arrow's stream have to be decoded from the beginning.
    """

    file: int
    first: int
    stride: int
    is_range: bool = False

    def has_bytes(self, url: str) -> bool:
        """Whether numbers count bytes of the file ``url`` and not rows."""
        return self.is_range and url.lower().endswith(PLAIN_LINES)

    def wanted(self, start: int, size: int | None = None) -> range:
        """The numbers of this part's rows from ``start`` on, of ``size`` where that is known."""
        if self.is_range and size is not None:
            begin, end = (size * i // self.stride for i in (self.first, self.first + 1))
            return range(max(begin, start), end)
        num_left_out = max(0, -((self.first - start) // self.stride))
        return range(self.first + num_left_out * self.stride, sys.maxsize, self.stride)


def read_rows(
    url: str, fields: Sequence[str], part: Part, start: int = 0
) -> Generator[tuple[int, Any], None, None]:
    """Read a part of a file.

    Args:
        url: Path, or a URL that ``fsspec`` opens.
        fields: What to read of each row.
        part: Which rows to decode; what the others cost depends on the format.
        start: The least number of a row to decode.

    Yields:
        The number of a row, counted from 0, and its :data:`Values` or a :class:`BadRow`.

    Raises:
        ValueError: If the file as a whole cannot be read.
    """
    fsspec: Any = importlib.import_module("fsspec")  # these have no types
    read = {"parquet": _parquet, "arrow": _arrow, "jsonl": _jsonl}[format_of(url) or "jsonl"]
    try:
        with fsspec.open(url, "rb", compression="infer") as file:
            if part.has_bytes(url):
                yield from _jsonl_range(file, fields, part, start)
            else:
                yield from read(file, fields, part, start)
    except (OSError, EOFError, ValueError) as error:  # pyarrow's errors are among these
        hint = "; pip install zstandard" if url.endswith(".zst") else ""
        raise ValueError(f"cannot read {url}: {error}{hint}") from error


def _jsonl(
    file: Any, fields: Sequence[str], part: Part, start: int
) -> Iterator[tuple[int, Values | BadRow]]:
    wanted = part.wanted(start)
    for number, line in enumerate(file):
        if number in wanted:
            yield number, _parse(line, fields)


def _jsonl_range(
    file: Any, fields: Sequence[str], part: Part, start: int
) -> Iterator[tuple[int, Values | BadRow]]:
    """Lines that begin in a range of bytes, each numbered by its first."""
    wanted = part.wanted(start, file.seek(0, os.SEEK_END))
    at = file.seek(max(wanted.start - 1, 0))
    if wanted.start:
        at += len(file.readline())  # begins before, or ends there
    while at < wanted.stop and (line := file.readline()):
        yield at, _parse(line, fields)
        at += len(line)


def _parse(line: bytes, fields: Sequence[str]) -> Values | BadRow:
    if not line.strip():
        return BadRow("empty")
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return BadRow("not UTF-8")
    except (ValueError, RecursionError):  # also for numbers of thousands of digits
        return BadRow("not JSON")
    if not isinstance(record, Mapping):
        return BadRow("wrong type")
    return tuple(record.get(name) for name in fields)


def _parquet(
    file: Any, fields: Sequence[str], part: Part, start: int
) -> Iterator[tuple[int, Values]]:
    pq: Any = importlib.import_module("pyarrow.parquet")
    reader = pq.ParquetFile(file)
    present = [name for name in fields if name in reader.schema_arrow.names]
    wanted = part.wanted(start, reader.metadata.num_rows)
    first = 0
    for group in range(reader.num_row_groups):
        stop = first + reader.metadata.row_group(group).num_rows
        if numbers := _within(wanted, first, stop):  # other row groups are not even fetched
            table = reader.read_row_group(group, columns=present)
            yield from _table(table, fields, first, numbers)
        first = stop


def _arrow(
    file: Any, fields: Sequence[str], part: Part, start: int
) -> Iterator[tuple[int, Values]]:
    pa: Any = importlib.import_module("pyarrow")
    wanted = part.wanted(start)
    first = 0
    for batch in _batches(pa, file):
        stop = first + batch.num_rows
        yield from _table(
            pa.Table.from_batches([batch]), fields, first, _within(wanted, first, stop)
        )
        first = stop


def _within(wanted: range, start: int, stop: int) -> range:
    """Those of ``wanted`` from ``start`` on and before ``stop``."""
    num_left_out = max(0, -((wanted.start - start) // wanted.step))
    return range(wanted.start + num_left_out * wanted.step, min(stop, wanted.stop), wanted.step)


def _batches(pa: Any, file: Any) -> Iterator[Any]:
    try:
        reader = pa.ipc.open_file(file)
    except pa.ArrowInvalid:  # the streaming format, which `datasets` writes
        file.seek(0)
        yield from pa.ipc.open_stream(file)
        return
    for index in range(reader.num_record_batches):
        yield reader.get_batch(index)


def _table(
    table: Any, fields: Sequence[str], start: int, numbers: range
) -> Iterator[tuple[int, Values]]:
    columns = [_undecoded(table.column(f)) if f in table.column_names else None for f in fields]
    for number in numbers:
        values = [None if column is None else column[number - start].as_py() for column in columns]
        yield number, tuple(values)


def _undecoded(column: Any) -> Any:
    """Text as bytes: Arrow does not check text, and Python raises for the wrong row or none."""
    pa: Any = importlib.import_module("pyarrow")
    # A cast without a copy; neither does it check.
    if pa.types.is_string(column.type):
        return column.cast(pa.binary())
    return column.cast(pa.large_binary()) if pa.types.is_large_string(column.type) else column


def text_of(value: object) -> str:
    """The text of a value.

    Raises:
        BadRow: ``missing``, ``wrong type``, ``not UTF-8``, or ``empty`` (so is white space alone).
    """
    if value is None:
        raise BadRow("missing")
    if isinstance(value, bytes):
        try:
            value = value.decode("utf-8")
        except UnicodeDecodeError:
            raise BadRow("not UTF-8") from None
    if not isinstance(value, str):
        raise BadRow("wrong type")
    if not value or value.isspace():
        raise BadRow("empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:  # half of a surrogate pair: JSON can escape what UTF-8 cannot hold
        raise BadRow("not UTF-8") from None
    return value


def score_of(value: object) -> float:
    """The score of a value.

    Raises:
        BadRow: ``no score`` unless it is a finite number.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise BadRow("no score")
    return float(value)


class BadRows:
    """What happens to bad rows.

    Args:
        action: ``error`` or ``skip``.

    Attributes:
        counts: Rows left out so far, by reason.
    """

    def __init__(self, action: str) -> None:
        self._action = action
        self.counts: dict[str, int] = {}

    def add(self, where: str, number: int, reason: str) -> None:
        """Count a row, and log the first, second, fourth, eighth ... one.

        Raises:
            ValueError: With file and row (from 1), where ``action`` is ``error``.
        """
        where = f"{where} {number + 1}: {reason}"
        if self._action == "error":
            raise ValueError(f"{where} (data.bad_rows = 'skip' leaves such rows out)")
        self.counts[reason] = self.counts.get(reason, 0) + 1
        total = sum(self.counts.values())
        if total & (total - 1) == 0:
            logger.warning("left out %s; %d rows so far", where, total)


def deal(
    order: Sequence[int], number: int, num_streams: int, by_ranges: bool = False
) -> list[Part]:
    """The parts of stream ``number``: over all streams, each row of each file once.

    With at least as many files as streams each file belongs to one stream, and is read once.
    Otherwise every stream has its part of each file: ranges, where ``by_ranges`` asks for them, or
    every ``num_streams``-th row, for which each stream reads all of the file.

    Args:
        order: The files' numbers in the order of the epoch.
        number: Of the stream, from 0.
        num_streams: How many there are.
        by_ranges: See :attr:`Part.is_range`.
    """
    if len(order) >= num_streams:
        return [Part(file, 0, 1) for file in order[number::num_streams]]
    # Turned from file to file: else the first streams got the odd row of every file.
    return [Part(file, (number + file) % num_streams, num_streams, by_ranges) for file in order]


def read_parts(
    urls: Sequence[str], parts: Sequence[Part], fields: Sequence[str], start: Place
) -> Iterator[Row]:
    """Rows of parts, from a position on.

    Args:
        urls: The files.
        parts: What to read of them, in order.
        fields: Fields of each row.
        start: A part's index in ``parts``, and the first row to read of its file.

    Yields:
        Each :data:`Row`.
    """
    first_part, first_row = start
    for index in range(first_part, len(parts)):
        part = parts[index]
        first = first_row if index == first_part else 0
        url = urls[part.file]
        where = f"{url}, {'byte' if part.has_bytes(url) else 'row'}"
        # Closed when the reader stops midway, and not when the collector comes around.
        with contextlib.closing(_rows_of_part(url, part, fields, first)) as rows:
            for number, values in rows:
                yield (index, number + 1), where, number, values


def _rows_of_part(
    url: str, part: Part, fields: Sequence[str], first: int
) -> Generator[tuple[int, Any], None, None]:
    """Rows of one part, from row ``first`` on; a connection that breaks is opened again."""
    failures = 0
    while True:
        try:
            with contextlib.closing(read_rows(url, fields, part, first)) as rows:
                for number, values in rows:
                    yield number, values
                    first, failures = number + 1, 0
            return
        except Exception as error:  # clients of networks raise what they like
            failures += 1
            if "://" not in url:
                raise
            if failures > RETRIES:
                is_told = isinstance(error, ValueError)
                raise DataError(
                    f"{'' if is_told else f'cannot read {url}: '}{error} ({failures} tries; a "
                    "restart goes on from the last checkpoint)"
                ) from error
            logger.warning("%s; going on at row %d (try %d)", error, first + 1, failures)
            time.sleep(min(2.0**failures, 60.0))


def good_rows(
    rows: Iterator[Row], bad: BadRows, judge: Callable[[Values], _T]
) -> Generator[tuple[Place, _T], None, None]:
    """What ``judge`` makes of the rows of :func:`read_parts`, each with the position after it.

    Args:
        rows: From :func:`read_parts`.
        bad: Gets those for which ``judge`` raises :class:`BadRow`.
        judge: What to make of a row's values.
    """
    for position, where, number, values in rows:
        try:
            if isinstance(values, BadRow):
                raise values
            found = judge(values)
        except BadRow as error:
            bad.add(where, number, str(error))
        else:
            yield position, found


def texts(rows: Iterator[Row], bad: BadRows) -> Generator[tuple[Place, str], None, None]:
    """The texts of :func:`good_rows`, of which they are the first field."""
    return good_rows(rows, bad, lambda values: text_of(values[0]))
