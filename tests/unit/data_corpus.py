"""Small corpora as files, for the tests of data."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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


def job_config(path: Path, dataset: str, **data: Any) -> SimpleNamespace:
    """The part of a job config that the loader reads."""
    defaults = {
        "num_streams": 4,
        "seed": 1,
        "bad_rows": "error",
        "text_field": "text",
        "shuffle_buffer": 5,
        "order": "uniform",
        "score_field": "",
        "hub_config": "",
        "split": "train",
        "revision": "",
    }
    training = SimpleNamespace(
        dataset=dataset,
        dataset_path=str(path),
        seq_len=8,
        local_batch_size=2,
        global_batch_size=-1,
        steps=12,
        dataloader=SimpleNamespace(num_workers=0),
    )
    return SimpleNamespace(training=training, data=SimpleNamespace(**{**defaults, **data}))
