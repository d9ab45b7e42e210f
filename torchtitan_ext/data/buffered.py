"""Streams over files too many to shuffle as a whole: read in order, shuffled block by block.

A stream reads the next ``shuffle_buffer`` good documents of its files, draws them in a random
order, and only then reads on. The position in a checkpoint is where the block began and how many
of its documents were drawn: a resume reads one block again and nothing else, and no text is kept.
A buffer refilled document by document would mix a little further, but its contents come from
arbitrarily far back, so that a checkpoint would have to hold them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Generator
from typing import Any

from torchtitan.components.tokenizer import BaseTokenizer

from torchtitan_ext.data.files import Files
from torchtitan_ext.data.rows import BadRows, Place, deal, read_parts, texts
from torchtitan_ext.data.streams import PackedDocuments, Position, permutation


@dataclasses.dataclass(slots=True)
class BlockPosition(Position):
    """Where a stream stands; ``index`` counts documents drawn of the block.

    Attributes:
        block: Blocks of the epoch before this one.
        part: Where the block begins: index among the parts of files of the stream.
        row: Where the block begins: first row of that file.
        skipped: Bad rows before the block since the start of training, by reason.
    """

    block: int = 0
    part: int = 0
    row: int = 0
    skipped: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(slots=True)
class _Block:
    """Documents in the order of drawing, and where the rows go on after them."""

    texts: list[str]
    rows: Generator[tuple[Place, str], None, None]
    end: Place
    bad: BadRows


class BufferedStream(PackedDocuments):
    """Sequences from the stream's part of files, see :mod:`torchtitan_ext.data.buffered`.

    Files come in another order in each epoch, the same for all streams, and are dealt to streams:
    see :func:`torchtitan_ext.data.rows.deal`.

    Args:
        files: The corpus.
        tokenizer: See :class:`PackedDocuments`, as for ``options``.
        text_field: Field of a row that holds the text.
        shuffle_buffer: Documents of a block; 1 keeps the order of the files.
        seed: Seeds the order of files and of the documents of each block.
        bad_rows: ``error`` or ``skip``.
        options: ``number``, ``num_streams``, ``length``, ``infinite``.
    """

    _position: BlockPosition

    def __init__(
        self,
        files: Files,
        tokenizer: BaseTokenizer,
        *,
        text_field: str = "text",
        shuffle_buffer: int = 10_000,
        seed: int = 42,
        bad_rows: str = "error",
        **options: Any,
    ) -> None:
        super().__init__(tokenizer, **options)
        self._files = files
        self._text_field = text_field
        self._shuffle_buffer = shuffle_buffer
        self._seed = seed
        self._bad_rows = bad_rows
        self._position = BlockPosition()
        self._block: _Block | None = None

    @property
    def skipped(self) -> dict[str, int]:
        """Bad rows that were left out since the start of training, by reason."""
        return dict(self._block.bad.counts if self._block else self._position.skipped)

    def _next_document(self) -> list[int] | None:
        position = self._position
        if self._block is None:
            self._block = self._open(position)
        elif position.index == len(self._block.texts):
            block = self._block
            position.part, position.row = block.end
            position.skipped = dict(block.bad.counts)
            position.block += 1
            position.index = 0
            self._block = self._fill(position, block.rows, block.bad)
        if not self._block.texts:
            return None
        text = self._block.texts[position.index]
        position.index += 1
        return self._encode(text)

    def _next_epoch(self) -> None:
        skipped = self.skipped
        # A new object: a half-made position must never be saved.
        self._position = dataclasses.replace(
            self._position,
            epoch=self._position.epoch + 1,
            index=0,
            block=0,
            part=0,
            row=0,
            skipped=skipped,
        )
        self._block = None

    def _open(self, position: BlockPosition) -> _Block:
        """Read the block that begins at ``position``."""
        bad = BadRows(self._bad_rows)
        bad.counts = dict(position.skipped)
        order = permutation(len(self._files.urls), self._seed, position.epoch)
        parts = deal(order, self.number, self._num_streams)
        start = (position.part, position.row)
        rows = texts(read_parts(self._files.urls, parts, (self._text_field,), start), bad)
        return self._fill(position, rows, bad)

    def _fill(self, position: BlockPosition, rows: Any, bad: BadRows) -> _Block:
        found = []
        end = (position.part, position.row)
        for end, text in itertools.islice(rows, self._shuffle_buffer):  # noqa: B007
            found.append(text)
        order = permutation(len(found), self._seed, position.epoch, self.number, position.block)
        return _Block([found[index] for index in order], rows, end, bad)

    def load_state(self, state: str) -> None:
        """Go to a position; its block is read again.

        Raises:
            ValueError: If the position cannot be one of this stream; which then stays as it is.
        """
        position = self._parse(BlockPosition, state)
        # At the very start, or between epochs, there is nothing to read again.
        block = self._open(position) if position.index else None
        self._check_index(position, len(block.texts) if block else 0)
        tokens: list[int] = []
        if block and position.leftover:
            tokens = self._leftover(position, self._encode(block.texts[position.index - 1]))
        self._position, self._block = position, block
        self._tokens, self._start = tokens, 0
