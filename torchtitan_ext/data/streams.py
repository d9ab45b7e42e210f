"""Streams: documents shuffled, tokenized and packed, with a position that a checkpoint can hold."""

from __future__ import annotations

import abc
import array
import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from torchtitan_ext.data.documents import Documents

if TYPE_CHECKING:  # the front door imports this file, and torchtitan takes seconds
    from torchtitan.components.tokenizer import BaseTokenizer

Order = Callable[[int], Sequence[int]]
"""Document numbers in the order of an epoch."""

Submit = Callable[[Callable[[], Any]], Callable[[], Any]]
"""Has something done while its caller goes on, who then waits for the result by a call."""


def permutation(size: int, *seeds: int) -> Sequence[int]:
    """Numbers ``0 .. size - 1`` in an order that ``seeds`` decide, the same on every machine."""
    digest = hashlib.sha256(json.dumps(seeds).encode()).digest()
    return _randperm(size, int.from_bytes(digest[:7], "big"))


def _randperm(size: int, seed: int) -> Sequence[int]:
    generator = torch.Generator().manual_seed(seed)
    # Eight bytes a number, where a list takes forty: corpora have millions of documents.
    return array.array("q", torch.randperm(size, generator=generator).numpy().tobytes())


class ShuffledOrder:
    """The order of documents, another one in each epoch.

    Args:
        num_documents: Size of the corpus.
        seed: Seeds the order, together with the epoch.
    """

    def __init__(self, num_documents: int, seed: int) -> None:
        self._num_documents = num_documents
        self._seed = seed
        self._orders: dict[int, Sequence[int]] = {}

    def __call__(self, epoch: int) -> Sequence[int]:
        """Document numbers in the order of ``epoch``; those of the two latest epochs are kept.

        Streams hold unlike numbers of tokens: around the end of an epoch some stand in the next.
        """
        if epoch not in self._orders:
            for other in sorted(self._orders)[:-1]:
                del self._orders[other]
            self._orders[epoch] = _randperm(self._num_documents, self._seed * 1_000_003 + epoch)
        return self._orders[epoch]


class SortedOrder:
    """Documents by their score, the same in every epoch; those of one score in corpus order.

    Args:
        scores: Score of each document.
        descend: Whether the highest come first.
    """

    def __init__(self, scores: Sequence[float], descend: bool = False) -> None:
        sign = -1.0 if descend else 1.0
        order = sorted(range(len(scores)), key=lambda document: sign * scores[document])
        self._order = array.array("q", order)

    def __call__(self, epoch: int) -> Sequence[int]:
        """Document numbers in order, whatever the ``epoch``."""
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


class DealtStream(abc.ABC):
    """One stream of several: every ``num_streams``-th item of a corpus, from a position on.

    Args:
        number: Which stream this is.
        num_streams: How many there are in the world.
        infinite: Whether to go on after an epoch.
    """

    _position: Position
    _position_class: type[Position] = Position

    def __init__(self, number: int, num_streams: int, infinite: bool = True) -> None:
        self.number = number
        self._num_streams = num_streams
        self._infinite = infinite

    @abc.abstractmethod
    def __next__(self) -> Sequence[int]:
        """The next sequence of tokens.

        Raises:
            StopIteration: At the end of a finite stream.
        """

    @property
    def num_sequences(self) -> int:
        """Sequences drawn since the start of training."""
        return self._position.num_sequences

    @property
    def epoch(self) -> int:
        """Passes over the stream's items that are complete."""
        return self._position.epoch

    def state(self) -> str:
        """The position, as JSON."""
        return json.dumps(dataclasses.asdict(self._position))

    @abc.abstractmethod
    def load_state(self, state: str) -> None:
        """Go to a position; a document under way is read again.

        Raises:
            ValueError: If the position cannot be one of this stream; which then stays as it is.
        """

    def _num_mine(self, size: int) -> int:
        """How many of ``size`` items are this stream's."""
        return len(range(self.number, size, self._num_streams))

    def position_of(self, state: str) -> Any:
        """The position that :meth:`state` gave.

        Raises:
            ValueError: If it is none.
        """
        try:
            return self._position_class(**json.loads(state))
        except (TypeError, json.JSONDecodeError):
            raise ValueError(
                f"stream_{self.number}: found {state!r}, expected a position"
            ) from None

    def read_ahead(self, submit: Submit) -> None:  # noqa: B027 (of use to few)
        """Have ``submit`` read what comes next, where that takes long; called before all else."""

    def _check_index(self, position: Position, size: int, items: str = "documents") -> None:
        lowest = 1 if position.leftover else 0
        if not lowest <= position.index <= size:
            raise ValueError(
                f"stream_{self.number}: found index {position.index}, "
                f"expected {lowest} to {size}, its number of {items}"
            )


class PackedDocuments(DealtStream):
    """Sequences of tokens from a stream of documents, which a subclass draws.

    Each document is followed by the end token, none is preceded by a begin token; documents are
    packed one after another, and what does not fill a sequence at the end of an epoch is dropped.

    Args:
        tokenizer: Turns text into tokens.
        length: Tokens of a sequence (one more than the model sees, for the labels).
        options: ``number``, ``num_streams``, ``infinite``; see :class:`DealtStream`.
    """

    def __init__(self, tokenizer: BaseTokenizer, *, length: int, **options: Any) -> None:
        super().__init__(**options)
        self._tokenizer = tokenizer
        self._length = length
        self._tokens: list[int] = []  # read and not yet drawn: from _start on
        self._start = 0

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
        tokens = self._next_document()
        if tokens is not None:
            self._tokens = self._tokens[self._start :] + tokens
            self._start = 0
            return
        if not self._infinite:
            raise StopIteration
        self._next_epoch()
        # Sequences of one epoch hold no text of another: the end of a corpus is not its start.
        self._tokens, self._start = [], 0
        if self._position.num_sequences == 0:
            raise ValueError(
                f"data.num_streams: found {self._num_streams}, and stream {self.number} holds "
                f"fewer than {self._length} tokens; expected fewer streams or more text"
            )

    @abc.abstractmethod
    def _next_document(self) -> list[int] | None:
        """Tokens of the next document, perhaps none; ``None`` at the end of the epoch."""

    def _next_epoch(self) -> None:
        self._position.epoch += 1
        self._position.index = 0

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_bos=False, add_eos=True))

    def _leftover(self, position: Position, document: list[int]) -> list[int]:
        """The tokens yet to come of ``document``, the last one read."""
        if position.leftover > len(document):
            raise ValueError(
                f"stream_{self.number}: found {position.leftover} tokens left over of a "
                f"document of {len(document)}; the corpus has changed"
            )
        return document[len(document) - position.leftover :]


class Stream(PackedDocuments):
    """Sequences from every ``num_streams``-th document of an order.

    Args:
        documents: The corpus.
        order: Its order in each epoch, shared by the streams of a process.
        tokenizer: See :class:`PackedDocuments`, as for ``options``.
        options: ``number``, ``num_streams``, ``length``, ``infinite``.
    """

    def __init__(
        self, documents: Documents, order: Order, tokenizer: BaseTokenizer, **options: Any
    ) -> None:
        super().__init__(tokenizer, **options)
        self._documents = documents
        self._order = order
        self._position = Position()

    def _text_tokens(self, epoch: int, index: int) -> list[int]:
        text = self._documents.text(self._order(epoch)[self.number + index * self._num_streams])
        return [] if text is None else self._encode(text)

    def _next_document(self) -> list[int] | None:
        if self._position.index >= self._num_mine(len(self._documents)):
            return None
        tokens = self._text_tokens(self._position.epoch, self._position.index)
        self._position.index += 1
        return tokens

    def load_state(self, state: str) -> None:
        """Go to a position; see :meth:`DealtStream.load_state`."""
        position = self.position_of(state)
        self._check_index(position, self._num_mine(len(self._documents)))
        tokens: list[int] = []
        if position.leftover:
            last = self._text_tokens(position.epoch, position.index - 1)
            tokens = self._leftover(position, last)
        self._position, self._tokens, self._start = position, tokens, 0
