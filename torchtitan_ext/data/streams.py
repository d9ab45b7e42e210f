"""Streams: documents shuffled, tokenized and packed, with a position that a checkpoint can hold."""

from __future__ import annotations

import dataclasses
import json

import torch
from torchtitan.components.tokenizer import BaseTokenizer

from torchtitan_ext.data.documents import Documents


class ShuffledOrder:
    """The order of documents, another one in each epoch.

    Args:
        num_documents: Size of the corpus.
        seed: Seeds the order, together with the epoch.
    """

    def __init__(self, num_documents: int, seed: int) -> None:
        self._num_documents = num_documents
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def __call__(self, epoch: int) -> list[int]:
        """Document numbers in the order of ``epoch``; the latest answer is kept."""
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._order = torch.randperm(self._num_documents, generator=generator).tolist()
            self._epoch = epoch
        return self._order


@dataclasses.dataclass(slots=True)
class Position:
    """Where a stream stands, between two sequences.

    Attributes:
        epoch: Passes over the corpus that are complete.
        index: Documents of the stream read in this epoch, the last one perhaps in part.
        leftover: Tokens at the end of that last document that are yet to come.
        num_sequences: Sequences drawn since the start of training.
    """

    epoch: int = 0
    index: int = 0
    leftover: int = 0
    num_sequences: int = 0


class Stream:
    """Sequences of tokens from every ``num_streams``-th document of the shuffled order.

    Each document is followed by the end token, none is preceded by a begin token; documents are
    packed one after another, and what does not fill a sequence at the end of an epoch is dropped.

    Args:
        documents: The corpus.
        order: Its order in each epoch, shared by the streams of a process.
        tokenizer: Turns text into tokens.
        number: Which stream this is.
        num_streams: How many there are in the world.
        length: Tokens of a sequence (one more than the model sees, for the labels).
        infinite: Whether to go on after an epoch.
    """

    def __init__(
        self,
        documents: Documents,
        order: ShuffledOrder,
        tokenizer: BaseTokenizer,
        *,
        number: int,
        num_streams: int,
        length: int,
        infinite: bool = True,
    ) -> None:
        self.number = number
        self._documents = documents
        self._order = order
        self._tokenizer = tokenizer
        self._num_streams = num_streams
        self._length = length
        self._infinite = infinite
        self._position = Position()
        self._tokens: list[int] = []  # read and not yet drawn: from _start on
        self._start = 0

    @property
    def num_sequences(self) -> int:
        """Sequences drawn since the start of training."""
        return self._position.num_sequences

    def __next__(self) -> list[int]:
        """The next ``length`` tokens.

        Raises:
            StopIteration: At the end of a finite stream.
            ValueError: If a whole epoch does not fill one sequence, or a document is unreadable.
        """
        while len(self._tokens) - self._start < self._length:
            self._read()
        end = self._start + self._length
        sequence = self._tokens[self._start : end]
        self._start = end
        self._position.leftover = len(self._tokens) - end
        self._position.num_sequences += 1
        return sequence

    def _read(self) -> None:
        """Append the next document, or go on to the next epoch."""
        mine = self._order(self._position.epoch)[self.number :: self._num_streams]
        if self._position.index < len(mine):
            tokens = self._encode(mine[self._position.index])
            self._position.index += 1
            self._tokens = self._tokens[self._start :] + tokens
            self._start = 0
            return
        if not self._infinite:
            raise StopIteration
        self._position.epoch += 1
        self._position.index = 0
        # Sequences of one epoch hold no text of another: the end of a corpus is not its start.
        self._tokens, self._start = [], 0
        self._require_one_sequence()

    def _require_one_sequence(self) -> None:
        if self._position.num_sequences == 0:
            raise ValueError(
                f"data.num_streams: found {self._num_streams}, and stream {self.number} holds "
                f"fewer than {self._length} tokens; expected fewer streams or more text"
            )

    def _encode(self, document: int) -> list[int]:
        text = self._documents.text(document)
        if text is None:
            return []
        return list(self._tokenizer.encode(text, add_bos=False, add_eos=True))

    def state(self) -> str:
        """The position, as JSON."""
        return json.dumps(dataclasses.asdict(self._position))

    def load_state(self, state: str) -> None:
        """Go to a position; the document under way is read again.

        Raises:
            ValueError: If the position cannot be one of this stream.
        """
        try:
            position = Position(**json.loads(state))
        except (TypeError, json.JSONDecodeError):
            raise ValueError(
                f"stream_{self.number}: found {state!r}, expected a position"
            ) from None
        tokens: list[int] = []
        if position.leftover:
            mine = self._order(position.epoch)[self.number :: self._num_streams]
            if not 0 < position.index <= len(mine):
                raise ValueError(
                    f"stream_{self.number}: found index {position.index}, "
                    f"expected 1 to {len(mine)}, its number of documents"
                )
            tokens = self._encode(mine[position.index - 1])
            if position.leftover > len(tokens):
                raise ValueError(
                    f"stream_{self.number}: found {position.leftover} tokens left over of a "
                    f"document of {len(tokens)}; the corpus has changed"
                )
            tokens = tokens[len(tokens) - position.leftover :]
        self._position, self._tokens, self._start = position, tokens, 0
