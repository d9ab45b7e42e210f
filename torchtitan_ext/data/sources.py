"""What ``training.dataset`` may name: where streams come from, and what tells sources apart."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from collections.abc import Callable
from typing import Annotated, Any, Literal

import torch.distributed as dist
import tyro
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import CommConfig, TrainingConfig
from torchtitan.hf_datasets import text_datasets as titan

from amo_dist.distributed.agreement import broadcast_text, world_group
from torchtitan_ext.data.buffered import BufferedStream
from torchtitan_ext.data.documents import Documents, standard_library, text_files
from torchtitan_ext.data.files import DataError, Files, Hub, find_files, is_on_hub
from torchtitan_ext.data.packed import COMMIT, PackedSequences, PackedStream
from torchtitan_ext.data.pool import Pool
from torchtitan_ext.data.streams import DealtStream, Order, ShuffledOrder, SortedOrder, Stream
from torchtitan_ext.data.tokenizers import identity

logger = logging.getLogger(__name__)

HUB_NAMES = {
    "fineweb_edu": "HuggingFaceFW/fineweb-edu",
    "slimpajama": "cerebras/SlimPajama-627B",
}
"""Where a dataset comes from unless ``training.dataset_path`` names a folder or another copy."""

DATASETS = ("text", "stdlib", "documents", "pool", "packed", *HUB_NAMES)
"""Values of ``training.dataset`` read here; torchtitan's own loader reads those that it knows.

What it reads is tokenized as here, without begin tokens, and packed as there: documents follow in
the order of the files, the end token of each is a label alone, and a resume needs the same number
of ranks."""


@dataclasses.dataclass(kw_only=True, slots=True)
class Dataset(titan.HuggingFaceTextDataLoader.Config):
    """What to read, and how."""

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
    other, and leave the first token of each out of the loss. Follows from ``model.attention``.
    """

    _training: Annotated[TrainingConfig | None, tyro.conf.Suppress] = None
    """The run that a pool is compared with, see :func:`torchtitan_ext.data.loader.settle`."""

    _comm: Annotated[CommConfig | None, tyro.conf.Suppress] = None
    """How long ranks wait for each other."""

    _validates: Annotated[bool, tyro.conf.Suppress] = False
    """Whether this is ``[validation]``, for names in errors."""

    num_workers: int | None = None
    """
    Processes of each rank that read and tokenize ahead; 0 does so in the training process, where a
    thread reads the next block of a dataset on the hub. By default 1, and for torchtitan's own
    datasets 0. The documents and a resume are the same.
    """

    prefetch_factor: int | None = None
    """Batches to have ready; by default those of two steps."""

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
    Documents of a block, which a stream shuffles and draws while it reads the next one. One of
    them is about five kilobytes of web text, and a rank has two blocks for each of
    ``num_streams`` over the number of ranks.
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
    Commit, tag or branch of a dataset on the hub. By default the latest commit when the run
    starts; a resume goes on with that of its checkpoint, and refuses another one given here.
    """


Source = tuple[Callable[..., DealtStream], dict[str, object]]
"""What makes the stream of a ``number``, and what the positions of streams refer to."""


def check_streams(config: Dataset, dp_world_size: int) -> None:
    """Check that streams can be dealt to data-parallel ranks.

    Raises:
        ValueError: For a number of streams that is no multiple of theirs.
    """
    if config.num_streams < 1 or config.num_streams % dp_world_size:
        raise ValueError(
            f"data.num_streams: found {config.num_streams}, expected a multiple of the "
            f"data-parallel degree {dp_world_size}"
        )


def check(config: Dataset, dp_world_size: int = 1) -> None:
    """Check what a config says about data, reading none.

    Raises:
        ValueError: Naming the field, what was found and what was expected.
    """
    if config.dataset not in DATASETS:
        # Without this a typo is told by torchtitan, which knows its own datasets alone.
        if config.dataset.lower() not in titan.DATASETS:
            known = ", ".join(map(repr, (*DATASETS, *titan.DATASETS)))
            raise ValueError(f"training.dataset: found {config.dataset!r}, expected one of {known}")
        return
    check_streams(config, dp_world_size)
    for name, least in (("num_workers", 0), ("prefetch_factor", 1)):
        found = getattr(config, name)
        if found is not None and found < least:
            raise ValueError(f"data.{name}: found {found}, expected an integer >= {least}")
    dataset = f"dataset {config.dataset!r}"
    if config.dataset not in ("stdlib", *HUB_NAMES) and not config.dataset_path:
        raise ValueError(
            f"training.dataset_path: found none, expected a folder, file or glob for {dataset}"
        )
    if config.order != "uniform" and config.dataset != "pool":
        raise ValueError(
            f"data.order: found {config.order!r}, expected 'uniform' for {dataset}; only 'pool' "
            "is ordered by score"
        )
    if config.dataset in ("documents", *HUB_NAMES) and config.shuffle_buffer < 1:
        raise ValueError(f"data.shuffle_buffer: found {config.shuffle_buffer}, expected at least 1")


def open_source(
    config: Dataset, tokenizer: BaseTokenizer, length: int, num_drawn: int = 0
) -> Source:
    """The streams of one of :data:`DATASETS`, and what their positions refer to.

    Args:
        config: The dataset.
        tokenizer: What turns text into tokens.
        length: Tokens of a sequence, labels included.
        num_drawn: Tokens that the run draws, to be compared with a pool; 0 for no comparison.

    Raises:
        ValueError: For a source that cannot be read, or does not fit.
    """
    make: Callable[..., DealtStream]
    order: Order
    source: dict[str, object]
    shared: dict[str, Any] = {"num_streams": config.num_streams, "infinite": config.infinite}
    if config.dataset == "packed":
        sequences = PackedSequences(str(config.dataset_path))
        sequences.check(length, identity(tokenizer))
        _require_enough(config, len(sequences), "sequences")
        order = ShuffledOrder(len(sequences), config.seed)
        make = functools.partial(PackedStream, sequences, order, **shared)
        source = {"documents": sequences.digest()}
    elif config.dataset in ("documents", *HUB_NAMES):
        files = _files(config)
        fields = ("text_field", "shuffle_buffer", "seed", "bad_rows")
        shared |= {name: getattr(config, name) for name in fields}
        make = functools.partial(BufferedStream, files, tokenizer, length=length, **shared)
        source = {
            "documents": files.digest,
            "shuffle_buffer": config.shuffle_buffer,
            "text_field": config.text_field,
            **_commit(files),
        }
    else:
        documents, order, source = _documents(config)
        _require_enough(config, len(documents), "documents")
        if num_drawn and isinstance(documents, Pool) and "score_field" in source:
            _warn_of_length(documents.num_tokens(tokenizer), num_drawn)
        make = functools.partial(Stream, documents, order, tokenizer, length=length, **shared)
        source["documents"] = documents.digest()
    return make, {
        **source,
        "num_streams": config.num_streams,
        "seed": config.seed,
        "tokenizer": identity(tokenizer),
    }


def _require_enough(config: Dataset, size: int, items: str) -> None:
    if size < config.num_streams:
        raise ValueError(
            f"data.num_streams: found {config.num_streams}, expected at most the number of "
            f"{items}, {size}"
        )


def _documents(config: Dataset) -> tuple[Documents, Order, dict[str, object]]:
    """Documents in random access, their order, and what is special about them."""
    documents: Documents
    if config.dataset != "pool":
        documents = (
            standard_library()
            if config.dataset == "stdlib"
            else text_files(str(config.dataset_path), config.pattern, config.undecodable)
        )
        return documents, ShuffledOrder(len(documents), config.seed), {}
    # The field that every row must have, whatever the order.
    score_field = config.score_field or (None if config.order == "uniform" else "score")
    files = _files(config)
    pool = Pool(files, config.text_field, score_field, config.bad_rows)
    source: dict[str, object] = {"order": config.order, "text_field": config.text_field}
    source |= _commit(files)
    if score_field is not None:
        source["score_field"] = score_field
    if config.order == "uniform":
        return pool, ShuffledOrder(len(pool), config.seed), source
    return pool, SortedOrder(pool.scores(), descend=config.order == "descend"), source


def _files(config: Dataset) -> Files:
    """The files, of a dataset on the hub those that the first rank found.

    The commit may change between two ranks' questions, and the hub limits the number of questions.
    """
    where = config.dataset_path or HUB_NAMES[config.dataset]
    hub = Hub(config.hub_config, config.split, config.revision)
    group = world_group()
    if group is None or not is_on_hub(where):
        return find_files(where, hub)
    answer: dict[str, Any] = {}
    if dist.get_rank(group) == 0:
        try:
            answer = {"files": dataclasses.asdict(find_files(where, hub))}
        except Exception as error:  # which the others would wait for
            answer = {"error": str(error), "may_pass": isinstance(error, DataError)}
    answer = json.loads(broadcast_text(json.dumps(answer), group))
    if "error" in answer:
        raise (DataError if answer["may_pass"] else ValueError)(answer["error"])
    return Files(**{**answer["files"], "urls": tuple(answer["files"]["urls"])})


def _commit(files: Files) -> dict[str, object]:
    return {COMMIT: files.commit} if files.commit else {}


def _warn_of_length(held: int, drawn: int) -> None:
    """Tell where a run draws much less of a pool than there is, or much more."""
    if not 0.9 * held <= drawn <= 1.1 * held:
        what = (
            "documents at the end of the order are never drawn"
            if drawn < held
            else "documents are drawn again, from the beginning of the order"
        )
        logger.warning(
            "training.steps: the run draws %.3g tokens of a pool of about %.3g: %s",
            drawn,
            held,
            what,
        )
