"""Batches of a data-parallel rank, and the positions of its streams in the checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from torchtitan_ext.data.ahead import Depth, Drawn, Reader, draw, draw_ahead
from torchtitan_ext.data.files import is_commit
from torchtitan_ext.data.packed import COMMIT
from torchtitan_ext.data.sources import check
from torchtitan_ext.data.streams import DealtStream
from torchtitan_ext.differences import differences

__all__ = ["Streams", "build", "document_positions", "settle", "validate"]

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]

Opened = tuple[Sequence[DealtStream], Mapping[str, object]]
"""Streams, and what their positions refer to."""


_START_ANEW = (
    "; `--checkpoint.exclude_from_loading dataloader` starts the data from the beginning, which "
    "trains on the same documents again"
)


class Streams(BaseDataLoader):
    """Draws each sequence from the least advanced of its streams, and stacks them into batches.

    The streams of the world are dealt to the data-parallel ranks, and so each global batch takes
    the next sequences in turn over all streams, whatever the number of ranks. A checkpoint has one
    entry for each stream of the world: a resume with another number of ranks deals them anew, and
    the same sequences follow, batch for batch.

    Finite streams end together on all ranks: with the first rank that cannot fill a batch, or with
    the last one, where others fill theirs with sequences that no loss counts.

    Args:
        streams: The rank's streams, in the order of their numbers.
        batch_size: Sequences of a batch.
        source: What the positions refer to; a resume must find the same.
        eos_id: The token that ends a document, to tell documents apart; ``None`` lets them see
            each other.
        infinite: Whether the streams never end.
        depth: How far other processes read ahead; ``None`` reads when a batch is asked for.
        reopen: Opens the source at the commit of a checkpoint; ``None`` where the config names one.
        fill: Tokens of a sequence that fills a batch; 0 for none.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(sources.Dataset):
        """``[data]``, and the dataset of ``[training]``."""

        def build(self, **options: Any) -> BaseDataLoader:
            """The loader, see :func:`build`."""
            with _named_for(self._validates):
                loader = build(self, **options)
            if self._validates and isinstance(loader, Streams):
                # Each validation opens its set anew: of a dataset on the hub the same commit.
                self.revision = loader.commit or self.revision
            return loader

    def __init__(
        self,
        streams: Sequence[DealtStream],
        batch_size: int,
        source: Mapping[str, object],
        eos_id: int | None = None,
        infinite: bool = True,
        depth: Depth | None = None,
        reopen: Callable[[str], Opened] | None = None,
        fill: int = 0,
    ) -> None:
        self._open(streams, source)
        self._batch_size = batch_size
        self._eos_id = eos_id
        self._infinite = infinite
        self._depth = depth
        self._reopen = reopen
        self._fill = fill

    def _open(self, streams: Sequence[DealtStream], source: Mapping[str, object]) -> None:
        self._streams = list(streams)
        self._source = dict(source)
        self._states = {stream.number: stream.state() for stream in streams}

    @property
    def commit(self) -> str:
        """Commit of a dataset on the hub; empty for other data."""
        return str(self._source.get(COMMIT, ""))

    def __iter__(self) -> Iterator[Batch]:
        """Batches ``({"input": (B, S) int64}, labels (B, S) int64)``, until the streams end.

        With ``eos_id`` the inputs have ``positions`` too, (B, S) int64 that restart after it, and
        the label of an end token is ignored.
        """
        drawn = self._draw()
        while (rows := self._next_rows(drawn)) is not None:
            buffer = bytearray().join(row.tokens for row in rows)
            buffer += bytes(4 * self._fill * (self._batch_size - len(rows)))
            tokens = torch.frombuffer(buffer, dtype=torch.int32).view(self._batch_size, -1).long()
            inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
            batch = {"input": inputs}
            if self._eos_id is not None:
                batch["positions"] = document_positions(inputs, self._eos_id)
                labels[inputs == self._eos_id] = IGNORE_INDEX
            labels[len(rows) :] = IGNORE_INDEX
            yield batch, labels

    def _draw(self) -> Iterator[Drawn]:
        if self._depth is None:
            return draw(self._streams)
        return draw_ahead(self._streams, dict(self._states), self._depth)

    def _next_rows(self, drawn: Iterator[Drawn]) -> list[Drawn] | None:
        """The sequences of the next batch, fewer where it is filled; ``None`` at the end."""
        rows = list(itertools.islice(drawn, self._batch_size))
        self._states.update((row.number, row.state) for row in rows)
        if self._infinite:
            return rows
        if self._fill:
            return None if _on_all_ranks(not rows) else rows
        return rows if _on_all_ranks(len(rows) == self._batch_size) else None

    def state_dict(self) -> dict[str, Any]:
        """``stream_<i>`` for each stream of this rank, and ``source``: all JSON strings."""
        state = {f"stream_{number}": state for number, state in self._states.items()}
        return {**state, "source": json.dumps(self._source, sort_keys=True)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to the positions of a checkpoint, in the commit of a dataset on the hub that it names.

        Raises:
            ValueError: If the checkpoint lacks a stream, or was made from another source.
        """
        if not state_dict:
            return
        saved = json.loads(state_dict["source"])
        commit = saved.get(COMMIT, self.commit)
        if commit != self.commit and self._reopen is not None:
            try:
                self._open(*self._reopen(commit))
            except ValueError as error:
                message = f"dataloader: found no commit {commit}, that of the checkpoint: {error}"
                raise ValueError(f"{message}{_START_ANEW}") from error
        self._check_source(saved)
        missing = [s.number for s in self._streams if f"stream_{s.number}" not in state_dict]
        if missing:
            raise ValueError(f"dataloader: the checkpoint lacks the positions of streams {missing}")
        for stream in self._streams:
            state = state_dict[f"stream_{stream.number}"]
            if self._depth is None:
                stream.load_state(state)
            self._states[stream.number] = state

    def _check_source(self, saved: dict[str, object]) -> None:
        found = self._source
        if COMMIT not in saved:  # a checkpoint from before, whose digest tells as much
            found = {name: value for name, value in found.items() if name != COMMIT}
        if changed := differences(saved, found):
            raise ValueError(
                f"dataloader: the data is not that of the checkpoint ({'; '.join(changed)})"
                f"{self._advice(saved)}{_START_ANEW}"
            )

    def _advice(self, saved: dict[str, object]) -> str:
        if not self.commit or saved.get("documents") == self._source["documents"]:
            return ""
        commit = saved.get(COMMIT, "<commit that the run began with>")
        return (
            f"; data.revision: found commit {self.commit}, expected {commit}: "
            f"`--data.revision {commit}` goes on with it"
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
            dataclasses.replace(config, num_workers=config.num_workers or 0),
            dp_world_size=dp_world_size,
            dp_rank=dp_rank,
            tokenizer=tokenizer,
            seq_len=seq_len,
            local_batch_size=local_batch_size,
            **others,
        )
    training = config._training
    num_ahead = 2 * local_batch_size
    num_drawn = 0  # one rank tells
    if training is not None:
        num_sequences = sequences_per_step(training, dp_world_size)
        num_ahead = 2 * num_sequences // dp_world_size  # two steps
        num_drawn = training.steps * num_sequences * seq_len if dp_rank == 0 else 0
    numbers = range(dp_rank, config.num_streams, dp_world_size)

    num_workers = 1 if config.num_workers is None else config.num_workers

    def opened(commit: str, num_drawn: int = 0) -> Opened:
        pinned = dataclasses.replace(config, revision=commit)
        make, source = sources.open_source(pinned, tokenizer, seq_len + 1, num_drawn)
        streams = [make(number=number) for number in numbers]
        if not num_workers and COMMIT in source:
            # Else retries here could take longer than the other ranks wait.
            reader = Reader(_limits(config).get("seconds", 0.0))
            for stream in streams:
                stream.read_ahead(reader.submit)
        return streams, source

    depth = None
    if num_workers:
        depth = Depth.of(
            num_workers, len(numbers), local_batch_size, num_ahead, config.prefetch_factor
        )
        depth = dataclasses.replace(depth, **_limits(config))
    streams, source = opened(config.revision, num_drawn)
    return Streams(
        streams,
        local_batch_size,
        source,
        tokenizer.eos_id if config.positions else None,
        config.infinite,
        depth,
        None if is_commit(config.revision) else opened,
        seq_len + 1 if config._validates else 0,
    )


def _limits(config: Streams.Config) -> dict[str, Any]:
    """How long to wait for data: less than ranks wait for each other, whose error tells nothing."""
    if (comm := config._comm) is None:
        return {}
    start = comm.train_timeout_seconds if config._validates else comm.init_timeout_seconds
    return {"start_seconds": 0.8 * start, "seconds": 0.8 * comm.train_timeout_seconds}


def settle(config: Any) -> None:
    """Tell the loaders of a whole config what its other sections say about them."""
    config.dataloader._training = config.training
    config.validator.dataloader._validates = True
    for one in (config.dataloader, config.validator.dataloader):
        one.positions = config.model.attention != "sdpa"
        one._comm = config.comm


def validate(config: Any, dp_world_size: int = 1) -> None:
    """Check what a whole config says about data, reading none.

    Args:
        config: All sections.
        dp_world_size: Data-parallel ranks, to which streams are dealt.

    Raises:
        ValueError: Naming the field, what was found and what was expected.
    """
    check(config.dataloader, dp_world_size)
    if config.validator.enable:
        if config.validator.freq < 1:
            raise ValueError(
                f"validation.freq: found {config.validator.freq}, expected an integer >= 1"
            )
        with _named_for(validation=True):
            check(config.validator.dataloader, dp_world_size)


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
