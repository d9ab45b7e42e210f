"""Documents of files: read in order from any row on, and judged one by one.

``datasets`` decodes whole batches, and one bad value fails a batch without naming its row. Here
each row is decoded by itself, so that a bad one can be counted, named and left out.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torchtitan_ext.data.files import DataError, format_of, is_outage

logger = logging.getLogger(__name__)

RETRIES = 9
"""Times that a remote file is opened again before a row comes: after 2, 4, 8 ... seconds, a minute
at most, and five in all, which is how long the hub counts requests."""

Raw = bytes | tuple[object, ...]
"""A row as it was read: a line of JSON, or the values of the fields (text perhaps as bytes)."""


class BadRow(Exception):
    """A row without usable text; the message is the reason, one of a few."""


def read_rows(url: str, fields: Sequence[str], start: int = 0) -> Iterator[tuple[int, Raw]]:
    """Read a file in order; where a server does not serve, wait and open it again.

    Args:
        url: Path, or a URL that ``fsspec`` opens.
        fields: Fields to read of each row.
        start: The first row to read.

    Yields:
        The number of a row, counted from 0, and the row.

    Raises:
        ValueError: If the file cannot be read.
        DataError: If its server does not serve for minutes.
    """
    failures = 0
    while True:
        try:
            for number, row in _read_once(url, fields, start):
                yield number, row
                start, failures = number + 1, 0
            return
        except ValueError as error:
            if not ("://" in url and is_outage(error)):
                raise
            failures += 1
            if failures > RETRIES:
                raise DataError(f"cannot read {url}: {error} ({failures} tries)") from error
            logger.warning("%s: %s; going on at row %d (try %d)", url, error, start + 1, failures)
            time.sleep(min(2.0**failures, 60.0))


def _read_once(url: str, fields: Sequence[str], start: int) -> Iterator[tuple[int, Raw]]:
    fsspec: Any = importlib.import_module("fsspec")  # these have no types
    readers = {"parquet": _parquet, "arrow": _arrow, "jsonl": _jsonl, "text": _text}
    try:
        # `infer` goes by the suffix; a plain file of another name is one text as it lies there.
        compression = "infer" if format_of(url) == "jsonl" else None
        with fsspec.open(url, "rb", compression=compression) as file:
            yield from readers[format_of(url)](file, fields, start)
    except Exception as error:  # of pyarrow, of four decompressors, of clients of networks
        raise ValueError(f"cannot read {url}: {error}") from error


def _text(file: Any, fields: Sequence[str], start: int) -> Iterator[tuple[int, Raw]]:
    if start == 0:
        yield 0, (file.read(), *(None,) * (len(fields) - 1))


def _jsonl(file: Any, fields: Sequence[str], start: int) -> Iterator[tuple[int, Raw]]:
    for number, line in enumerate(file):
        if number >= start:
            yield number, line


def _parquet(file: Any, fields: Sequence[str], start: int) -> Iterator[tuple[int, Raw]]:
    pq: Any = importlib.import_module("pyarrow.parquet")
    reader = pq.ParquetFile(file)
    present = [name for name in fields if name in reader.schema_arrow.names]
    first = 0
    for group in range(reader.num_row_groups):
        stop = first + reader.metadata.row_group(group).num_rows
        if start < stop:  # other row groups are not even fetched
            for batch in reader.iter_batches(row_groups=[group], columns=present):
                yield from _batch(batch, fields, first, start)
                first += batch.num_rows
        first = stop


def _arrow(file: Any, fields: Sequence[str], start: int) -> Iterator[tuple[int, Raw]]:
    pa: Any = importlib.import_module("pyarrow")
    first = 0
    for batch in _batches(pa, file):
        yield from _batch(batch, fields, first, start)
        first += batch.num_rows


def _batches(pa: Any, file: Any) -> Iterator[Any]:
    try:
        reader = pa.ipc.open_file(file)
    except pa.ArrowInvalid:  # the streaming format, which `datasets` writes
        file.seek(0)
        yield from pa.ipc.open_stream(file)
        return
    for index in range(reader.num_record_batches):
        yield reader.get_batch(index)


def _batch(batch: Any, fields: Sequence[str], first: int, start: int) -> Iterator[tuple[int, Raw]]:
    """Rows of a batch, whose first has the number ``first``, from ``start`` on."""
    names = batch.schema.names
    columns = [_undecoded(batch.column(f)) if f in names else None for f in fields]
    for row in range(max(0, start - first), batch.num_rows):
        values = (None if column is None else column[row].as_py() for column in columns)
        yield first + row, tuple(values)


def _undecoded(column: Any) -> Any:
    """Text as bytes: Arrow does not check text, and Python raises for the wrong row or none."""
    pa: Any = importlib.import_module("pyarrow")
    # A cast without a copy; neither does it check.
    if pa.types.is_string(column.type):
        return column.cast(pa.binary())
    return column.cast(pa.large_binary()) if pa.types.is_large_string(column.type) else column


def judge(row: Raw, fields: Sequence[str]) -> tuple[str, float]:
    """The text of a row and, where ``fields`` has two, its score (else 0).

    Raises:
        BadRow: ``not JSON``, ``missing``, ``wrong type``, ``not UTF-8``, ``empty`` (so is white
            space alone), or ``no score``.
    """
    values = _parse(row, fields) if isinstance(row, bytes) else row
    return _text_of(values[0]), _score_of(values[1]) if len(fields) > 1 else 0.0


def _parse(line: bytes, fields: Sequence[str]) -> tuple[object, ...]:
    if not line.strip():
        raise BadRow("empty")
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise BadRow("not UTF-8") from None
    except (ValueError, RecursionError):  # also for numbers of thousands of digits
        raise BadRow("not JSON") from None
    if not isinstance(record, Mapping):
        raise BadRow("wrong type")
    return tuple(record.get(name) for name in fields)


def _text_of(value: object) -> str:
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


def _score_of(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise BadRow("no score")
    return float(value)


class BadRows:
    """Rows that are left out: named, counted, and an error where they are too many.

    Args:
        most: The largest share of all rows, from 0 to 1.
        num_rows: Rows so far.
        counts: Bad ones among them, by reason.
    """

    def __init__(self, most: float, num_rows: int, counts: Mapping[str, int]) -> None:
        self._most = most
        self.num_rows = num_rows
        self.counts = dict(counts)
        self._last = "before this start"

    def add(self, row: str, reason: str) -> None:
        """Count a row, and log the first, second, fourth, eighth ... one."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self._last = f"{row}: {reason}"
        total = sum(self.counts.values())
        if total & (total - 1) == 0:
            logger.warning("left out %s; %d rows so far", self._last, total)

    def check(self, at_end: bool = False) -> None:
        """Check their share, of the first thousand rows on or of all.

        Raises:
            ValueError: Names the latest one, and how many there are for which reasons.
        """
        total = sum(self.counts.values())
        if total > self._most * (self.num_rows if at_end else max(self.num_rows, 1000)):
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.counts.items())
            raise ValueError(
                f"dataloader.max_bad_rows: found {total} bad rows among {self.num_rows} "
                f"({reasons}), expected a share of at most {self._most:g}; the last: {self._last}"
            )
