"""One fixed pool of documents in random access: all of it shuffled, or ordered by a score.

The good rows of the files are written once to a memory-mapped Arrow file in the cache of
``datasets`` (``HF_DATASETS_CACHE``), which ranks of one machine share. What decides about the rows
is part of the name in the cache, so that a changed corpus is converted anew.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torchtitan_ext.data.files import Files
from torchtitan_ext.data.rows import BadRows, Part, Values, good_rows, read_parts, score_of, text_of

if TYPE_CHECKING:  # torchtitan takes seconds, and nothing else here needs it
    from torchtitan.components.tokenizer import BaseTokenizer

logger = logging.getLogger(__name__)

TEXT, SCORE = "text", "score"


class Pool:
    """Documents by number, with a score each where ``score_field`` is given.

    Args:
        files: The corpus.
        text_field: Field of a row that holds the text.
        score_field: Field that holds the score, a finite number; ``None`` reads none.
        bad_rows: ``error`` or ``skip``; a row without a score is a bad one.

    Raises:
        ValueError: For a bad row, or a file that cannot be read.
    """

    def __init__(
        self,
        files: Files,
        text_field: str = "text",
        score_field: str | None = None,
        bad_rows: str = "error",
    ) -> None:
        self._digest = files.digest
        self._table = _table(files, text_field, score_field, bad_rows)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def digest(self) -> str:
        """Hexadecimal digest of the files."""
        return self._digest

    def text(self, index: int) -> str:
        """The text of document ``index``."""
        return str(self._table[TEXT][index])

    def num_tokens(self, tokenizer: BaseTokenizer, num_samples: int = 256) -> int:
        """About how many tokens there are, end tokens included.

        Args:
            tokenizer: Turns text into tokens.
            num_samples: Documents, evenly spaced, that tell how many bytes a token takes.
        """
        pc: Any = importlib.import_module("pyarrow.compute")  # which has no types
        texts = [self.text(i) for i in range(0, len(self), max(1, len(self) // num_samples))]
        num_tokens = sum(len(tokenizer.encode(text, add_bos=False)) for text in texts)
        num_bytes = sum(len(text.encode()) for text in texts)
        of_all = pc.sum(pc.binary_length(self._table.data.column(TEXT))).as_py()
        return int(of_all * num_tokens / num_bytes) + len(self) if texts else 0

    def scores(self) -> Sequence[float]:
        """The score of each document; of use with a ``score_field``."""
        return list(self._table.data.column(SCORE).to_pylist())


def _table(files: Files, text_field: str, score_field: str | None, bad_rows: str) -> Any:
    import datasets
    from datasets.exceptions import DatasetGenerationError

    features = datasets.Features(
        {TEXT: datasets.Value("large_string"), SCORE: datasets.Value("float64")}
    )
    try:
        return datasets.Dataset.from_generator(
            generate,
            features=features,
            gen_kwargs={
                # A tuple: a list would be taken for files to be dealt to processes.
                "urls": files.urls,
                "digest": files.digest,
                "text_field": text_field,
                "score_field": score_field,
                "bad_rows": bad_rows,
            },
        )
    except DatasetGenerationError as error:
        cause = error.__cause__
        raise cause if isinstance(cause, ValueError) else error from None


def generate(
    urls: Sequence[str], digest: str, text_field: str, score_field: str | None, bad_rows: str
) -> Iterator[dict[str, object]]:
    """The good rows of files; ``digest`` is here for the cache, which goes by the arguments.

    Raises:
        ValueError: For a bad row where ``bad_rows`` is ``error``.
    """
    del digest
    bad = BadRows(bad_rows)
    fields = (text_field,) if score_field is None else (text_field, score_field)
    parts = [Part(file, 0, 1) for file in range(len(urls))]

    def judge(values: Values) -> dict[str, object]:
        text = text_of(values[0])
        return {TEXT: text, SCORE: None if score_field is None else score_of(values[1])}

    rows = read_parts(urls, parts, fields, (0, 0))
    yield from (row for _, row in good_rows(rows, bad, judge))
    if bad.counts:
        logger.warning("left out bad rows: %s", bad.counts)
