"""Batches of a data-parallel rank, and the positions of its streams in the checkpoint."""

from __future__ import annotations

import dataclasses
import heapq
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol

import torch
import tyro
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.hf_datasets import text_datasets as titan
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader

from torchtitan_ext.batch import sequences_per_step
from torchtitan_ext.data.buffered import BufferedStream
from torchtitan_ext.data.documents import Documents, standard_library, text_files
from torchtitan_ext.data.files import Hub, find_files
from torchtitan_ext.data.packed import PackedSequences, PackedStream
from torchtitan_ext.data.pool import Pool
from torchtitan_ext.data.streams import Order, ShuffledOrder, SortedOrder, Stream
from torchtitan_ext.data.tokenizers import identity
from torchtitan_ext.differences import differences

logger = logging.getLogger(__name__)

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]

HUB_NAMES = {
    "fineweb_edu": "HuggingFaceFW/fineweb-edu",
    "slimpajama": "cerebras/SlimPajama-627B",
}
"""Where a dataset comes from unless ``training.dataset_path`` names a folder or another copy."""

DATASETS = ("text", "stdlib", "documents", "pool", "packed", *HUB_NAMES)
"""Values of ``training.dataset`` read here; torchtitan's own loader reads those that it knows.

What it reads is tokenized as here, without begin tokens, and packed as there: documents follow in
the order of the files, and a resume needs the same number of ranks."""


class AnyStream(Protocol):
    """What the loader asks of a stream."""

    number: int

    @property
    def num_sequences(self) -> int:
        """Sequences drawn since the start of training."""

    def __next__(self) -> Sequence[int]:
        """The next sequence of tokens."""

    def state(self) -> str:
        """The position."""

    def load_state(self, state: str) -> None:
        """Go to a position."""


Make = Callable[[int], AnyStream]
"""Makes the stream of a number."""


class Streams(BaseDataLoader):
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

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(HuggingFaceTextDataLoader.Config):
        """``[data]``, and the dataset of ``[training]``."""

        dataset: str = "c4_test"
        """One of :data:`DATASETS`, or a name that torchtitan knows."""

        dataset_path: str | None = None
        """Folder, file or glob of the dataset, or its name on the hub."""

        pattern: str = "**/*.txt"
        """Files taken from ``dataset_path`` when that is a folder (``dataset = "text"``)."""

        num_streams: int = 96
        """
        Streams into which the documents are dealt. A multiple of the data-parallel degree; a
        checkpoint holds the position of each, so that the degree may change on resume.
        """

        seed: int = 42
        """Seeds the order of documents."""

        undecodable: Literal["error", "skip"] = "error"
        """What to do with a file that cannot be read or is not UTF-8: stop, or leave it out."""

        positions: Annotated[bool, tyro.conf.Suppress] = False
        """
        Tell the model each token's place in its document, which keeps documents from seeing each
        other. Follows from ``model.attention``.
        """

        # From here on: dataset = "documents", "fineweb_edu", "slimpajama" or "pool".

        bad_rows: Literal["error", "skip"] = "error"
        """
        What to do with a row whose text is missing, not text, not UTF-8 or empty: stop and name
        it, or count it and leave it out.
        """

        text_field: str = "text"
        """Field of a row that holds the text."""

        shuffle_buffer: int = 10_000
        """
        Documents that each stream reads, shuffles and draws before it reads on. One of them is
        about five kilobytes of web text, and a rank has ``num_streams`` over its number of ranks
        of these.
        """

        order: Literal["uniform", "ascend", "descend"] = "uniform"
        """
        Order of ``dataset = "pool"``: shuffled as a whole in each epoch, or by ``score_field``
        from the lowest or the highest on.
        """

        score_field: str = ""
        """
        Field of a row of ``dataset = "pool"`` that holds a finite number to order by; ``score`` by
        default with the orders that need one. Where it is named a row without is a bad one in the
        order ``uniform`` too, so that all orders draw the same documents.
        """

        hub_config: str = ""
        """Subset of a dataset on the hub, such as ``sample-100BT``; by default that of the hub."""

        split: str = "train"
        """Split of a dataset on the hub."""

        revision: str = ""
        """
        Commit of a dataset on the hub; by default the latest. A resume refuses another one than
        that of the checkpoint.
        """

    def __init__(
        self, streams: Sequence[AnyStream], batch_size: int, source: Mapping[str, object]
    ) -> None:
        self._streams = list(streams)
        self._make_heap()
        self._batch_size = batch_size
        self._source = dict(source)

    def __iter__(self) -> Iterator[Batch]:
        """Batches ``({"input": (B, S) int64}, labels (B, S) int64)``, until a stream ends."""
        while True:
            try:
                rows = [self._next_row() for _ in range(self._batch_size)]
            except StopIteration:
                return
            tokens = torch.tensor(rows, dtype=torch.int64)
            yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()

    def _next_row(self) -> Sequence[int]:
        """The next sequence of the least advanced stream."""
        _, number, stream = self._heap[0]
        row = next(stream)
        heapq.heapreplace(self._heap, (stream.num_sequences, number, stream))
        return row

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


def build_dataloader(
    dp_world_size: int,
    dp_rank: int,
    tokenizer: BaseTokenizer,
    job_config: Any,
    infinite: bool = True,
) -> BaseDataLoader:
    """The loader for ``training.dataset``: one of :data:`DATASETS`, or torchtitan's own.

    Raises:
        ValueError: For an unknown dataset, or fields that cannot work together, naming them.
    """
    training, data = job_config.training, job_config.data
    _require_known("training.dataset", training.dataset, DATASETS)
    if training.dataset not in DATASETS:
        return titan.build_text_dataloader(dp_world_size, dp_rank, tokenizer, job_config, infinite)
    _validate(training, data, dp_world_size)
    options = {
        "num_streams": data.num_streams,
        "length": training.seq_len + 1,
        "infinite": infinite,
    }
    if training.dataset in ("text", "stdlib", "pool"):
        make, source = _indexed(training, data, tokenizer, options, dp_world_size, dp_rank)
    elif training.dataset == "packed":
        make, source = _packed(training, data, tokenizer, options)
    else:
        make, source = _buffered(training, data, tokenizer, options)
    streams = [make(number) for number in range(dp_rank, data.num_streams, dp_world_size)]
    source |= {
        "num_streams": data.num_streams,
        "seed": data.seed,
        "tokenizer": identity(tokenizer),
    }
    return Streams(streams, training.local_batch_size, source)


def validate(config: Any) -> None:
    """Check what ``[training]``, ``[validation]`` and ``[data]`` say about data, reading none.

    Raises:
        ValueError: Naming the field, what was found and what was expected.
    """
    training = config.training
    # Another module may bring datasets of its own when training imports it.
    if config.experimental.custom_import == "torchtitan_ext":
        _require_known("training.dataset", training.dataset, DATASETS)
        if config.validation.enable:  # which torchtitan reads
            _require_known("validation.dataset", config.validation.dataset, ())
    if training.dataset in DATASETS:
        _validate(training, config.data)


def _require_known(field: str, found: str, ours: Sequence[str]) -> None:
    """Without this a typo is told by torchtitan, which knows its own datasets alone."""
    if found not in ours and found.lower() not in titan.DATASETS:
        known = ", ".join(map(repr, (*ours, *titan.DATASETS)))
        raise ValueError(f"{field}: found {found!r}, expected one of {known}")


def check_streams(data: Any, dp_world_size: int) -> None:
    """Check that streams can be dealt to data-parallel ranks.

    Raises:
        ValueError: For a number of streams that is no multiple of theirs.
    """
    if data.num_streams < 1 or data.num_streams % dp_world_size:
        raise ValueError(
            f"data.num_streams: found {data.num_streams}, expected a multiple of the "
            f"data-parallel degree {dp_world_size}"
        )


def _require_enough(data: Any, size: int, items: str) -> None:
    if size < data.num_streams:
        raise ValueError(
            f"data.num_streams: found {data.num_streams}, expected at most the number of "
            f"{items}, {size}"
        )


def _validate(training: Any, data: Any, dp_world_size: int = 1) -> None:
    check_streams(data, dp_world_size)
    if training.dataloader.num_workers:
        raise ValueError(
            f"training.dataloader.num_workers: found {training.dataloader.num_workers}, expected "
            f"0: dataset {training.dataset!r} is read in the training process"
        )
    if training.dataset not in ("stdlib", *HUB_NAMES) and not training.dataset_path:
        raise ValueError(
            "training.dataset_path: found none, expected a folder, file or glob for dataset "
            f"{training.dataset!r}"
        )
    if data.order != "uniform" and training.dataset != "pool":
        raise ValueError(
            f"data.order: found {data.order!r}, expected 'uniform' for dataset "
            f"{training.dataset!r}; only 'pool' is ordered by score"
        )
    is_buffered = training.dataset in ("documents", *HUB_NAMES)
    if is_buffered and data.shuffle_buffer < 1:
        raise ValueError(f"data.shuffle_buffer: found {data.shuffle_buffer}, expected at least 1")


def _indexed(
    training: Any,
    data: Any,
    tokenizer: BaseTokenizer,
    options: Mapping[str, Any],
    dp_world_size: int,
    dp_rank: int,
) -> tuple[Make, dict[str, object]]:
    """Documents in random access, in one order."""
    documents: Documents
    source: dict[str, object] = {}
    if training.dataset == "pool":
        documents, order = _pool(training, data)
        source |= {"order": data.order, "text_field": data.text_field}
        if (score_field := _score_field(data)) is not None:
            source["score_field"] = score_field
            if dp_rank == 0:
                _warn_of_length(documents, tokenizer, training, dp_world_size)
    else:
        documents = (
            standard_library()
            if training.dataset == "stdlib"
            else text_files(training.dataset_path, data.pattern, data.undecodable)
        )
        order = ShuffledOrder(len(documents), data.seed)
    _require_enough(data, len(documents), "documents")
    source["documents"] = documents.digest()
    return lambda number: Stream(documents, order, tokenizer, number=number, **options), source


def _score_field(data: Any) -> str | None:
    """The field of scores that every row of a pool must have, whatever the order."""
    return data.score_field or (None if data.order == "uniform" else "score")


def _pool(training: Any, data: Any) -> tuple[Pool, Order]:
    files = find_files(training.dataset_path, _hub(data))
    pool = Pool(files, data.text_field, _score_field(data), data.bad_rows)
    if data.order == "uniform":
        return pool, ShuffledOrder(len(pool), data.seed)
    return pool, SortedOrder(pool.scores(), descend=data.order == "descend")


def _warn_of_length(
    pool: Pool, tokenizer: BaseTokenizer, training: Any, dp_world_size: int
) -> None:
    """Tell where a run draws much less of a pool than there is, or much more."""
    batch = sequences_per_step(training, dp_world_size)
    drawn, held = training.steps * batch * training.seq_len, pool.num_tokens(tokenizer)
    if not 0.9 * held <= drawn <= 1.1 * held:
        what = (
            "documents at the end of the order are never drawn"
            if drawn < held
            else "documents are drawn again, from the beginning of the order"
        )
        logger.warning(
            "training.steps: %d steps draw %.3g tokens of a pool of about %.3g: %s",
            training.steps,
            drawn,
            held,
            what,
        )


def _buffered(
    training: Any, data: Any, tokenizer: BaseTokenizer, options: Mapping[str, Any]
) -> tuple[Make, dict[str, object]]:
    """Documents of any number of files, each stream with a shuffle buffer of its own."""
    files = find_files(training.dataset_path or HUB_NAMES[training.dataset], _hub(data))
    source: dict[str, object] = {
        "documents": files.digest,
        "shuffle_buffer": data.shuffle_buffer,
        "text_field": data.text_field,
    }
    fields = ("text_field", "shuffle_buffer", "seed", "bad_rows")
    settings = {**options, **{name: getattr(data, name) for name in fields}}
    return lambda number: BufferedStream(files, tokenizer, number=number, **settings), source


def _hub(data: Any) -> Hub:
    return Hub(data.hub_config, data.split, data.revision)


def _packed(
    training: Any, data: Any, tokenizer: BaseTokenizer, options: Mapping[str, Any]
) -> tuple[Make, dict[str, object]]:
    """Sequences that were tokenized and packed beforehand."""
    sequences = PackedSequences(training.dataset_path)
    sequences.check(training.seq_len + 1, identity(tokenizer))
    _require_enough(data, len(sequences), "sequences")
    order = ShuffledOrder(len(sequences), data.seed)
    num_streams, infinite = options["num_streams"], options["infinite"]
    source: dict[str, object] = {"documents": sequences.digest()}
    return lambda number: PackedStream(sequences, order, number, num_streams, infinite), source
