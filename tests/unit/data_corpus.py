"""Small corpora as files, for the tests of data."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan_ext.data.loader import Streams
from torchtitan_ext.data.tokenizers import ByteTokenizer

Rows = Sequence[dict[str, Any]]


def write_jsonl(path: Path, rows: Rows) -> Path:
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
    return path


def write_parquet(path: Path, rows: Rows, row_group_size: int = 3) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=row_group_size)
    return path


def write_arrow(path: Path, rows: Rows, stream: bool = True) -> Path:
    import pyarrow as pa

    table = pa.Table.from_pylist(list(rows))
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with new(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    return path


def dataset(path: Path, name: str, **fields: Any) -> Streams.Config:
    """A config of few and small streams."""
    few: dict[str, Any] = {"num_streams": 4, "seed": 1, "shuffle_buffer": 5}
    return Streams.Config(dataset=name, dataset_path=str(path), **{**few, **fields})


def build(
    config: Streams.Config, world: int = 1, rank: int = 0, batch: int = 2, seq_len: int = 8
) -> Any:
    """The loader of a rank, over bytes."""
    return config.build(
        dp_world_size=world,
        dp_rank=rank,
        tokenizer=ByteTokenizer(),
        seq_len=seq_len,
        local_batch_size=batch,
    )
