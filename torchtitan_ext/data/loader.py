"""Batches of a data-parallel rank, and the positions of its streams in the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.hf_datasets.text_datasets import build_text_dataloader

from torchtitan_ext.data.documents import Documents, standard_library, text_files
from torchtitan_ext.data.streams import ShuffledOrder, Stream

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]

DATASETS = ("text", "stdlib")
"""Values of ``training.dataset`` read here; torchtitan's own loader reads the others."""


class StreamLoader(BaseDataLoader):
    """Draws each sequence from the least advanced of its streams, and stacks them into batches.

    The streams of the world are dealt to the data-parallel ranks, and so each global batch takes
    the next sequences in turn over all streams, whatever the number of ranks. A checkpoint has one
    entry for each stream of the world: a resume with another number of ranks deals them anew, and
    the same sequences follow, batch for batch.

    Args:
        streams: The rank's streams, in the order of their numbers.
        batch_size: Sequences of a batch.
        source: What the positions refer to; a resume must find the same.
    """

    def __init__(
        self, streams: Sequence[Stream], batch_size: int, source: Mapping[str, object]
    ) -> None:
        self._streams = list(streams)
        self._batch_size = batch_size
        self._source = dict(source)

    def __iter__(self) -> Iterator[Batch]:
        """Batches ``({"input": (B, S) int64}, labels (B, S) int64)``, until a stream ends."""
        while True:
            try:
                rows = [next(self._least_advanced()) for _ in range(self._batch_size)]
            except StopIteration:
                return
            tokens = torch.tensor(rows, dtype=torch.int64)
            yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()

    def _least_advanced(self) -> Stream:
        return min(self._streams, key=lambda stream: (stream.num_sequences, stream.number))

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

    def _check_source(self, saved: dict[str, object]) -> None:
        names = sorted({*saved, *self._source})
        changed = [name for name in names if saved.get(name) != self._source.get(name)]
        if changed:
            parts = [f"{n}: was {saved.get(n)!r}, is {self._source.get(n)!r}" for n in changed]
            raise ValueError(
                f"dataloader: the data is not that of the checkpoint ({'; '.join(parts)}); "
                "`--checkpoint.exclude_from_loading dataloader` starts the data from the beginning"
            )


def build_dataloader(
    dp_world_size: int,
    dp_rank: int,
    tokenizer: BaseTokenizer,
    job_config: Any,
    infinite: bool = True,
) -> BaseDataLoader:
    """The loader for ``training.dataset``: one of :data:`DATASETS`, or torchtitan's own.

    Raises:
        ValueError: For fields that cannot work together, naming them.
    """
    training, data = job_config.training, job_config.data
    if training.dataset not in DATASETS:
        return build_text_dataloader(dp_world_size, dp_rank, tokenizer, job_config, infinite)
    _validate(training, data, dp_world_size)
    documents = _documents(training, data)
    if len(documents) < data.num_streams:
        raise ValueError(
            f"data.num_streams: found {data.num_streams}, expected at most the number of "
            f"documents, {len(documents)}"
        )
    order = ShuffledOrder(len(documents), data.seed)
    streams = [
        Stream(
            documents,
            order,
            tokenizer,
            number=number,
            num_streams=data.num_streams,
            length=training.seq_len + 1,
            infinite=infinite,
        )
        for number in range(dp_rank, data.num_streams, dp_world_size)
    ]
    source = {
        "documents": documents.digest(),
        "num_streams": data.num_streams,
        "seed": data.seed,
        "tokenizer": f"{type(tokenizer).__name__}-{tokenizer.get_vocab_size()}",
    }
    return StreamLoader(streams, training.local_batch_size, source)


def _validate(training: Any, data: Any, dp_world_size: int) -> None:
    if data.num_streams < 1 or data.num_streams % dp_world_size:
        raise ValueError(
            f"data.num_streams: found {data.num_streams}, expected a multiple of the "
            f"data-parallel degree {dp_world_size}"
        )
    if training.dataloader.num_workers:
        raise ValueError(
            f"training.dataloader.num_workers: found {training.dataloader.num_workers}, expected "
            f"0: dataset {training.dataset!r} is read in the training process"
        )
    if training.dataset == "text" and not training.dataset_path:
        raise ValueError(
            "training.dataset_path: found none, expected a folder, file or glob for dataset 'text'"
        )


def _documents(training: Any, data: Any) -> Documents:
    if training.dataset == "stdlib":
        return standard_library()
    return text_files(training.dataset_path, data.pattern, data.undecodable)
