"""Small corpora as files, for the tests of data."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan_ext.data.loader import PackedLoader
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


def write_texts(folder: Path, texts: Sequence[str]) -> Path:
    folder.mkdir(exist_ok=True)
    for number, text in enumerate(texts):
        (folder / f"{number:03}.txt").write_text(text)
    return folder


def dataset(path: Path | str, name: str = "text", **fields: Any) -> PackedLoader.Config:
    """A config whose tokens lie beside the data."""
    tokens = str(Path(str(path).partition("=")[0]).parent / "tokens")
    given = {"dataset": name, "dataset_path": str(path), "tokens": tokens, "seed": 1, **fields}
    return PackedLoader.Config(**given)


def build(
    config: PackedLoader.Config, world: int = 1, rank: int = 0, batch: int = 2, seq_len: int = 8
) -> Any:
    """The loader of a rank, over bytes."""
    return config.build(
        dp_world_size=world,
        dp_rank=rank,
        tokenizer=ByteTokenizer(),
        seq_len=seq_len,
        local_batch_size=batch,
    )
