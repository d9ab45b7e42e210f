"""Streams over files too many to shuffle as a whole: read in order, shuffled block by block.

A stream reads the next ``shuffle_buffer`` good documents of its files, draws them in a random
order, and only then reads on. The position in a checkpoint is where the block began and how many
of its documents were drawn: a resume reads one block again and nothing else, and no text is kept.
Where streams are read by processes of their own, the next block is read while the present one
serves.
A buffer refilled document by document would mix a little further, but its contents come from
arbitrarily far back, so that a checkpoint would have to hold them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from torchtitan.components.tokenizer import BaseTokenizer

from torchtitan_ext.data.files import Files
from torchtitan_ext.data.rows import BadRows, Place, deal, read_parts, texts
from torchtitan_ext.data.streams import PackedDocuments, Position, Submit, permutation


@dataclasses.dataclass(slots=True)
class BlockPosition(Position):
    """Where a stream stands; ``index`` counts documents drawn of the block.

    Attributes:
        block: Blocks of the epoch before this one.
        part: Where the block begins: index among the parts of files of the stream.
        row: Where the block begins: first row of that file, or byte.
        skipped: Bad rows before the block since the start of training, by reason.
        by_ranges: How fewer files than streams are dealt. A checkpoint that does not say was made
            when every stream had every ``num_streams``-th row, and goes on with that.
    """

    block: int = 0
    part: int = 0
    row: int = 0
    skipped: dict[str, int] = dataclasses.field(default_factory=dict)
    by_ranges: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class _Block:
    """Documents in the order of drawing.

    Attributes:
        texts: None at the end of an epoch.
        start: The position before the first.
        end: The position after the last.
    """

    texts: list[str]
    start: BlockPosition
    end: BlockPosition


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
    _position_class = BlockPosition

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
        self._position = BlockPosition(by_ranges=True)
        self._block: _Block | None = None
        self._blocks: Iterator[_Block] = iter(())  # those after it ...
        self._ready: list[_Block] = []  # ... of which these are read
        self._reading: Callable[[], list[_Block]] | None = None
        self._submit: Submit | None = None

    @property
    def skipped(self) -> dict[str, int]:
        """Bad rows that were left out since the start of training, by reason."""
        return dict((self._block.end if self._block else self._position).skipped)

    def read_ahead(self, submit: Submit) -> None:
        """Have ``submit`` read each block while the one before it serves."""
        self._submit = submit

    def _next_document(self) -> list[int] | None:
        if self._block is None:
            self._blocks = self._blocks_from(self._position)
            self._serve(next(self._blocks))
        elif self._block.texts and self._position.index == len(self._block.texts):
            self._serve_next()
        assert self._block is not None
        if not self._block.texts:
            return None
        text = self._block.texts[self._position.index]
        self._position.index += 1
        return self._encode(text)

    def _next_epoch(self) -> None:
        self._serve_next()

    def _serve_next(self) -> None:
        if not self._ready:
            reading = self._reading
            self._ready = _read_on(self._blocks) if reading is None else reading()
        self._serve(self._ready.pop(0))

    def _serve(self, block: _Block) -> None:
        """Draw from ``block``, and begin to read the one after it."""
        self._block = block
        self._position = dataclasses.replace(
            block.start,
            leftover=self._position.leftover,
            num_sequences=self._position.num_sequences,
        )
        self._go_on_reading()

    def _go_on_reading(self) -> None:
        if self._submit is not None and not self._ready:
            self._reading = self._submit(functools.partial(_read_on, self._blocks))

    def _blocks_from(self, start: BlockPosition) -> Iterator[_Block]:
        """The block that begins at ``start``, and those that follow; an empty one ends an epoch."""
        bad = BadRows(self._bad_rows)
        bad.counts = dict(start.skipped)
        while True:
            order = permutation(len(self._files.urls), self._seed, start.epoch)
            parts = deal(order, self.number, self._num_streams, start.by_ranges)
            place, fields = (start.part, start.row), (self._text_field,)
            rows = texts(read_parts(self._files.urls, parts, fields, place), bad)
            while (block := self._fill(start, rows, bad)).texts:
                yield block
                start = block.end
            yield block
            if not self._infinite:
                return
            start = dataclasses.replace(block.end, epoch=start.epoch + 1, block=0, part=0, row=0)

    def _fill(
        self, start: BlockPosition, rows: Iterator[tuple[Place, str]], bad: BadRows
    ) -> _Block:
        found, (part, row) = [], (start.part, start.row)
        for (part, row), text in itertools.islice(rows, self._shuffle_buffer):  # noqa: B007
            found.append(text)
        order = permutation(len(found), self._seed, start.epoch, self.number, start.block)
        end = dataclasses.replace(
            start, index=0, block=start.block + 1, part=part, row=row, skipped=dict(bad.counts)
        )
        begin = dataclasses.replace(start, index=0)
        return _Block([found[index] for index in order], begin, end)

    def load_state(self, state: str) -> None:
        """Go to a position; its block is read again.

        Raises:
            ValueError: If the position cannot be one of this stream; which then stays as it is.
        """
        position = self.position_of(state)
        blocks = self._blocks_from(position)
        # At the very start, or between epochs, there is nothing to read again.
        block = next(blocks) if position.index else None
        self._check_index(position, len(block.texts) if block else 0)
        tokens: list[int] = []
        if block and position.leftover:
            tokens = self._leftover(position, self._encode(block.texts[position.index - 1]))
        self._position, self._block, self._blocks = position, block, blocks
        self._ready, self._reading = [], None
        self._tokens, self._start = tokens, 0
        if block:
            self._go_on_reading()


def _read_on(blocks: Iterator[_Block]) -> list[_Block]:
    """The next block; with the end of an epoch the first of the next one, if there is one."""
    found = [next(blocks)]
    return found if found[0].texts else [*found, *itertools.islice(blocks, 1)]
