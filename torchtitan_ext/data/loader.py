"""Batches of a data-parallel rank, and the positions of its streams in the checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.hf_datasets import text_datasets as titan
from torchtitan.tools import utils

from torchtitan_ext.batch import sequences_per_step
from torchtitan_ext.data import sources
from torchtitan_ext.data.sources import check, check_streams
from torchtitan_ext.data.streams import DealtStream
from torchtitan_ext.differences import differences

__all__ = ["Streams", "build", "check_streams", "document_positions", "settle", "validate"]

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


class Streams(BaseDataLoader):
    """Draws each sequence from the least advanced of its streams, and stacks them into batches.

    The streams of the world are dealt to the data-parallel ranks, and so each global batch takes
    the next sequences in turn over all streams, whatever the number of ranks. A checkpoint has one
    entry for each stream of the world: a resume with another number of ranks deals them anew, and
    the same sequences follow, batch for batch.

    Finite streams end together on all ranks, with the first rank that cannot fill a batch.

    Args:
        streams: The rank's streams, in the order of their numbers.
        batch_size: Sequences of a batch.
        source: What the positions refer to; a resume must find the same.
        eos_id: The token that ends a document, to tell documents apart; ``None`` lets them see
            each other.
        infinite: Whether the streams never end.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(sources.Dataset):
        """``[data]``, and the dataset of ``[training]``."""

        def build(self, **options: Any) -> BaseDataLoader:
            """The loader, see :func:`build`."""
            with _named_for(self._validates):
                return build(self, **options)

    def __init__(
        self,
        streams: Sequence[DealtStream],
        batch_size: int,
        source: Mapping[str, object],
        eos_id: int | None = None,
        infinite: bool = True,
    ) -> None:
        self._streams = list(streams)
        self._make_heap()
        self._batch_size = batch_size
        self._source = dict(source)
        self._eos_id = eos_id
        self._infinite = infinite

    def __iter__(self) -> Iterator[Batch]:
        """Batches ``({"input": (B, S) int64}, labels (B, S) int64)``, until the streams end.

        With ``eos_id`` the inputs have ``positions`` too, (B, S) int64 that restart after it, and
        the label of an end token is ignored.
        """
        while rows := self._next_rows():
            tokens = torch.tensor(rows, dtype=torch.int64)
            inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
            batch = {"input": inputs}
            if self._eos_id is not None:
                batch["positions"] = document_positions(inputs, self._eos_id)
                labels[inputs == self._eos_id] = IGNORE_INDEX
            yield batch, labels

    def _next_rows(self) -> list[Sequence[int]]:
        """The next sequences, each of the least advanced stream; none where streams have ended."""
        rows: list[Sequence[int]] = []
        while self._heap and len(rows) < self._batch_size:
            _, number, stream = self._heap[0]
            if (row := next(stream, None)) is None:
                heapq.heappop(self._heap)
            else:
                heapq.heapreplace(self._heap, (stream.num_sequences, number, stream))
                rows.append(row)
        complete = len(rows) == self._batch_size
        return rows if self._infinite or _on_all_ranks(complete) else []

    def _make_heap(self) -> None:
        self._heap = [(stream.num_sequences, stream.number, stream) for stream in self._streams]
        heapq.heapify(self._heap)  # numbers differ, and streams are never compared

    def state_dict(self) -> dict[str, Any]:
        """``stream_<i>`` for each stream of this rank, and ``source``: all JSON strings."""
        state = {f"stream_{stream.number}": stream.state() for stream in self._streams}
        return {**state, "source": json.dumps(self._source, sort_keys=True)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to the positions of a checkpoint.

        Raises:
            ValueError: If the checkpoint lacks a stream, or was made from another source.
        """
        if not state_dict:
            return
        self._check_source(json.loads(state_dict["source"]))
        missing = [s.number for s in self._streams if f"stream_{s.number}" not in state_dict]
        if missing:
            raise ValueError(f"dataloader: the checkpoint lacks the positions of streams {missing}")
        for stream in self._streams:
            stream.load_state(state_dict[f"stream_{stream.number}"])
        self._make_heap()

    def _check_source(self, saved: dict[str, object]) -> None:
        if changed := differences(saved, self._source):
            raise ValueError(
                f"dataloader: the data is not that of the checkpoint ({'; '.join(changed)}); "
                "`--checkpoint.exclude_from_loading dataloader` starts the data from the beginning"
            )


def document_positions(tokens: torch.Tensor, eos_id: int) -> torch.Tensor:
    """The place of each token in its document, from 0 on.

    A document ends with ``eos_id``; one that began in the sequence before counts from here.

    Args:
        tokens: (B, S) int64.
        eos_id: The token that ends a document.

    Returns:
        (B, S) int64.
    """
    places = torch.arange(tokens.shape[1])
    starts = torch.zeros_like(tokens)
    starts[:, 1:] = torch.where(tokens[:, :-1] == eos_id, places[1:], 0)
    return places - starts.cummax(dim=1).values


def _on_all_ranks(found: bool) -> bool:
    """Whether all ranks ``found``: one that draws on alone waits for the others for ever."""
    if dist.is_initialized():
        flag = torch.tensor(float(found), device=utils.device_type)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        found = bool(flag)
    return found


class _Stock(titan.HuggingFaceTextDataLoader):
    """torchtitan's own datasets; where documents see each other their tokens count on."""

    def __init__(self, config: Streams.Config, **options: Any) -> None:
        super().__init__(config, **options)
        self._keep_positions = config.positions

    def __iter__(self) -> Iterator[Batch]:
        for inputs, labels in super().__iter__():
            if not self._keep_positions:
                inputs.pop("positions")
            yield inputs, labels


def build(
    config: Streams.Config,
    *,
    dp_world_size: int,
    dp_rank: int,
    tokenizer: BaseTokenizer,
    seq_len: int,
    local_batch_size: int,
    **others: Any,
) -> BaseDataLoader:
    """The loader of a data-parallel rank: :class:`Streams`, or for its own datasets torchtitan's.

    Raises:
        ValueError: For an unknown dataset, or fields that cannot work together, naming them.
    """
    check(config, dp_world_size)
    if config.dataset not in sources.DATASETS:
        return _Stock(
            config,
            dp_world_size=dp_world_size,
            dp_rank=dp_rank,
            tokenizer=tokenizer,
            seq_len=seq_len,
            local_batch_size=local_batch_size,
            **others,
        )
    training = config._training
    num_drawn = 0  # one rank tells
    if training is not None and dp_rank == 0:
        num_drawn = training.steps * sequences_per_step(training, dp_world_size) * seq_len
    make, source = sources.open_source(config, tokenizer, seq_len + 1, num_drawn)
    numbers = range(dp_rank, config.num_streams, dp_world_size)
    streams = [make(number=number) for number in numbers]
    eos_id = tokenizer.eos_id if config.positions else None
    return Streams(streams, local_batch_size, source, eos_id, config.infinite)


def settle(config: Any) -> None:
    """Tell the loaders of a whole config what its other sections say about them."""
    config.dataloader._training = config.training
    config.validator.dataloader._validates = True
    for one in (config.dataloader, config.validator.dataloader):
        one.positions = config.model.attention != "sdpa"


def validate(config: Any) -> None:
    """Check what a whole config says about data, reading none.

    Raises:
        ValueError: Naming the field, what was found and what was expected.
    """
    check(config.dataloader)
    if config.validator.enable:
        if config.validator.freq < 1:
            raise ValueError(
                f"validation.freq: found {config.validator.freq}, expected an integer >= 1"
            )
        with _named_for(validation=True):
            check(config.validator.dataloader)


@contextlib.contextmanager
def _named_for(validation: bool) -> Iterator[None]:
    """Name the fields in errors as a file names those of ``[validation]``, where it is meant."""
    try:
        yield
    except ValueError as error:
        if not validation:
            raise
        # The tokenizer and the length of sequences are those of training.
        message = re.sub(r"^data(?!\.tokenizer)", "validation.dataloader", str(error))
        raise ValueError(re.sub(r"^training(?=\.data)", "validation", message)) from None
