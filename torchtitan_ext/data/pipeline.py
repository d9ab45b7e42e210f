"""Steps of ``datatrove`` that make tokens of files: the good rows, and their tokens.

``datatrove`` runs them by task, and marks the tasks that are done in ``logs/completions``.
"""

from __future__ import annotations

import array
import codecs
import functools
import io
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pyarrow
from datatrove.data import Document
from datatrove.pipeline.readers import ParquetReader
from datatrove.pipeline.tokens import DocumentTokenizer
from datatrove.utils.logging import logger

from torchtitan_ext.data.tokenizers import Tokenizer

JSON_LINES = tuple(
    suffix + compression
    for suffix in (".jsonl", ".json")
    for compression in ("", ".gz", ".zst", ".bz2", ".xz")
)
FORMATS = (".parquet", ".txt", *JSON_LINES)  # Read by default. Any other file is plain text.


class Rows(ParquetReader):
    """Documents of parquet, JSON lines and plain text, one document per text file.

    ``datatrove``'s readers pass over a row without text or a line that is no JSON. Here bad rows
    are counted by reason, named in the log of the task, and limited. Blank lines are no rows.

    Args:
        folder: Path or URL that ``fsspec`` opens.
        paths_file: File with the paths in ``folder`` that are read, one a line.
        text_field: Field of a row that holds the text.
        score_field: Field of a row that holds the score; empty reads none.
        max_bad_rows: Largest share of bad rows among those of a task, from 0 to 1.
    """

    name = "rows"

    def __init__(
        self, folder: str, paths_file: str, text_field: str, score_field: str, max_bad_rows: float
    ) -> None:
        # Only the columns of text and id are read: the score takes the place of the id.
        super().__init__(
            folder,
            paths_file,
            text_key=text_field,
            id_key=score_field or text_field,
            read_metadata=False,
        )
        self.has_scores, self.max_bad_rows = bool(score_field), max_bad_rows

    def read_file(self, filepath: str) -> Iterator[Document]:
        """Good documents of a file.

        Raises:
            ValueError: The file is damaged; names it and the reason.
        """
        try:
            yield from self._documents(filepath)
        except Exception as error:  # each compression has errors of its own
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"{filepath}: found a damaged file: {reason}") from error

    def _documents(self, filepath: str) -> Iterator[Document]:
        name = filepath.lower()
        if name.endswith(".parquet"):
            yield from super().read_file(filepath)
            return
        is_rows, is_zst = name.endswith(JSON_LINES), name.endswith(".zst")
        compression = None if is_zst else "infer"
        with self.data_folder.open(filepath, "rb", compression=compression) as opened:
            file: Any = opened
            if is_zst:  # fsspec's reader gives no lines, and takes a file that was cut for whole
                file = io.BufferedReader(pyarrow.input_stream(opened, compression="zstd"), 2**20)
            for number, content in enumerate(file if is_rows else [file.read()]):
                if number == 0:
                    content = content.removeprefix(codecs.BOM_UTF8)
                if is_rows and not content.strip():
                    continue  # often the last line
                try:
                    row = orjson.loads(content) if is_rows else {self.text_key: content.decode()}
                except ValueError:
                    row = "not JSON" if is_rows else "not UTF-8"
                if document := self.get_document_from_dict(row, filepath, number):
                    yield document

    def get_document_from_dict(self, data: Any, source_file: str, id_in_file: int) -> Any:
        """The document of a row, or None for a bad one, which may be the reason itself."""
        row = data if isinstance(data, dict) else {}
        text, reason = row.get(self.text_key), ""
        score: Any = row.get(self.id_key) if self.has_scores else 0.0
        if not isinstance(text, str) or not text.strip():
            reason = data if isinstance(data, str) else "no text"
        elif type(score) not in (int, float) or not math.isfinite(score):
            reason = "no score"
        self.stat_update("rows")
        if reason:
            self.stat_update("bad rows", f"bad rows: {reason}")
            logger.warning(f"bad row {source_file}:{id_in_file + 1}: {reason}")
            return None
        return Document(text=text, id=f"{source_file}:{id_in_file}", metadata={"score": score})

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Good documents of a task.

        Raises:
            ValueError: The share of bad rows is too large.
        """
        yield from super().run(data, rank, world_size)
        num_bad, num_rows = (int(self.stats[name].total) for name in ("bad rows", "rows"))
        if num_bad > self.max_bad_rows * num_rows:
            raise ValueError(
                f"--max-bad-rows: found {num_bad} bad rows among {num_rows}, expected a share of "
                f"at most {self.max_bad_rows:g}; logs/logs names them"
            )


class Tokens(DocumentTokenizer):
    """Write the tokens of a task, and the scores of its documents.

    The index is written last but for the scores: a task that was killed has none.

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
        built = self.config.build(tokenizer_path=self.config.path)

        def encode_batch(texts: list[str]) -> list[Any]:
            return [SimpleNamespace(ids=ids) for ids in built.encode_documents(texts)]

        return SimpleNamespace(encode_batch=encode_batch, get_vocab_size=built.get_vocab_size)

    def write_unshuffled(self, data: Iterable[Document], filename: str) -> Any:
        """Write the documents of a task; returns ``datatrove``'s file."""
        scores = array.array("d")

        def scored() -> Iterator[Document]:
            for document in data:
                scores.append(document.metadata["score"])
                yield document

        written = super().write_unshuffled(scored(), filename)
        if self.has_scores:
            (self.folder / f"{filename}.scores").write_bytes(scores.tobytes())
        return written
