"""Steps of ``datatrove`` that make tokens of files: rows, a filter of bad ones, tokens.

``datatrove`` runs them by task, and marks the tasks that are done in ``logs/completions``.
"""

from __future__ import annotations

import array
import contextlib
import functools
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
from datatrove.data import Document
from datatrove.pipeline.filters.base_filter import BaseFilter
from datatrove.pipeline.readers import ParquetReader
from datatrove.pipeline.tokens import DocumentTokenizer
from datatrove.pipeline.writers import JsonlWriter

from torchtitan_ext.data.tokenizers import Tokenizer

JSON_LINES = tuple(
    suffix + compression
    for suffix in (".jsonl", ".json")
    for compression in ("", ".gz", ".zst", ".bz2", ".xz")
)
FORMATS = (".parquet", ".txt", *JSON_LINES)
"""Suffixes of the files that are read by default. Any other file is plain text."""


class Rows(ParquetReader):
    """Documents of parquet, JSON lines and plain text, one document per text file.

    ``datatrove``'s readers pass over a row without text or a line that is no JSON. Here it comes
    out as a document with the reason, for :class:`BadRows` to count.

    Args:
        folder: Path or URL that ``fsspec`` opens.
        paths_file: File with the paths in ``folder`` that are read, one a line.
        text_field: Field of a row that holds the text.
        score_field: Field of a row that holds the score; empty reads none.
    """

    name = "rows"

    def __init__(self, folder: str, paths_file: str, text_field: str, score_field: str) -> None:
        # Only the columns of text and id are read: the score takes the place of the id.
        super().__init__(
            folder,
            paths_file,
            adapter=_as_document,
            text_key=text_field,
            id_key=score_field or text_field,
            read_metadata=False,
        )
        self.add_file_path = False

    def read_file(self, filepath: str) -> Iterator[Document]:
        """Documents of a file."""
        name = filepath.lower()
        if name.endswith(".parquet"):
            yield from super().read_file(filepath)
        elif name.endswith(JSON_LINES):
            with self.data_folder.open(filepath, "rb", compression="infer") as file:
                for number, line in enumerate(file):
                    yield self.get_document_from_dict(_parse(line), filepath, number)
        else:
            with self.data_folder.open(filepath, "rb") as file:
                row = {self.text_key: file.read()}
                yield self.get_document_from_dict(row, filepath, 0)


def _parse(line: bytes) -> Any:
    """A row, or the reason why a line is none."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        return "not JSON" if line.strip() else "empty"
    return row if isinstance(row, dict) else "wrong type"


def _as_document(reader: Rows, row: Any, path: str, number: int) -> dict[str, Any]:
    """Fields of a document; those of a bad row have the reason, and a text for the filter."""
    text, reason = None, row
    score: Any = 0.0
    if isinstance(row, dict):
        text = row.get(reader.text_key)
        if reader.id_key != reader.text_key:
            score = row.get(reader.id_key)
        if isinstance(text, bytes):
            with contextlib.suppress(UnicodeDecodeError):
                text = text.decode()
        reason = _reason(text, score)
    metadata = {"reason": reason} if reason else {"reason": "", "score": score}
    return {"text": "-" if reason else text, "id": f"{path}:{number + 1}", "metadata": metadata}


def _reason(text: object, score: object) -> str:
    """Why a row is left out; empty for a good one."""
    if not isinstance(text, str):
        return {type(None): "missing", bytes: "not UTF-8"}.get(type(text), "wrong type")
    if not text or text.isspace():
        return "empty"
    if isinstance(score, bool) or not isinstance(score, (int, float)) or not math.isfinite(score):
        return "no score"
    return ""


class BadRows(BaseFilter):
    """Leave out bad rows, count them by reason, and list them in the logs.

    Args:
        logs: Folder of the logs.
        max_share: Largest share of the rows of a task, from 0 to 1.
    """

    name = "bad rows"

    def __init__(self, logs: str, max_share: float) -> None:
        super().__init__(JsonlWriter(f"{logs}/bad_rows", compression=None))
        self.max_share = max_share

    def filter(self, doc: Document) -> tuple[bool, str]:
        """Whether a document is good, and the reason why it is not."""
        reason = doc.metadata["reason"]
        return not reason, reason

    def run(self, data: Iterable[Document], rank: int = 0, world_size: int = 1) -> Any:
        """Good documents.

        Raises:
            ValueError: The share of bad ones is too large.
        """
        yield from super().run(data, rank, world_size)
        num_bad, num_rows = (int(self.stats[name].total) for name in ("dropped", "total"))
        if num_bad > self.max_share * num_rows:
            raise ValueError(
                f"--max-bad-rows: found {num_bad} bad rows among {num_rows}, expected a share of "
                f"at most {self.max_share:g}; logs/bad_rows lists them"
            )


class Tokens(DocumentTokenizer):
    """Write the tokens of a task, and the scores of its documents.

    The files get their names when they are complete.

    Args:
        folder: Folder of the tokens.
        tokenizer: ``[tokenizer]``.
        has_scores: Whether documents have scores.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer.Config, has_scores: bool) -> None:
        super().__init__(
            str(folder),
            tokenizer_name_or_path=tokenizer.path,
            save_final_metadata=False,
            batch_size=1000,
            shuffle_documents=False,
        )
        self.folder, self.config, self.has_scores = folder, tokenizer, has_scores

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The project's tokenizer, as far as ``datatrove`` calls one of ``tokenizers``."""
        built: Any = self.config.build(tokenizer_path=self.config.path)

        def encode_batch(texts: list[str]) -> list[Any]:
            return [SimpleNamespace(ids=ids) for ids in built.encode_documents(texts)]

        return SimpleNamespace(encode_batch=encode_batch, get_vocab_size=built.get_vocab_size)

    def write_unshuffled(self, data: Iterable[Document], filename: str) -> Any:
        """Write the documents of a task; returns ``datatrove``'s file."""
        scores = array.array("d")

        def scored() -> Iterator[Document]:
            for document in data:
                scores.append(document.metadata["score"] if self.has_scores else 0.0)
                yield document

        # Processes of a killed run may still write to a file of theirs.
        for left in self.folder.glob(f"{filename}.*.tmp*"):
            left.unlink(missing_ok=True)
        scratch = self.folder / f"{filename}.{os.getpid()}.tmp"
        written = super().write_unshuffled(scored(), scratch.name)
        os.rename(f"{scratch}.index", self.folder / f"{filename}.index")
        if self.has_scores:
            (self.folder / f"{filename}.scores").write_bytes(scores.tobytes())
        os.rename(scratch, self.folder / filename)
        return written
