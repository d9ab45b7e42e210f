"""Batches of a data-parallel rank: sequences of packed tokens, by one global number."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import torch
import tyro
from torchdata.nodes import IterableWrapper, Prefetcher
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.config import derive
from torchtitan.hf_datasets import text_datasets as titan

from amo_dist.config import require
from torchtitan_ext.data.corpus import Corpus, open_packed, standard_library
from torchtitan_ext.data.order import Mixture, shuffled
from torchtitan_ext.data.tokenizers import Tokenizer
from torchtitan_ext.imports import import_class
from torchtitan_ext.runs.records import differences

logger = logging.getLogger(__name__)

# Values of `dataloader.dataset` that are read by this loader; torchtitan's own loader reads those
# that it knows. It gets the project's tokens, without begin tokens, and packs them its own way:
# documents follow in the order of the files, the end token of each is a label alone, and a resume
# needs the same number of ranks.
DATASETS = ("packed", "stdlib")

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]

BATCHES_AHEAD = 16  # Batches that a thread reads while steps run: more than most steps accumulate.


class PackedLoader(BaseDataLoader):
    """Batches of sequences, each known by one number that counts them over all ranks and steps.

    A batch of the world takes the next numbers in turn, whatever the number of ranks; so the same
    sequences follow where a run goes on with another number.

    Args:
        config: ``[dataloader]``.
        dp_world_size: Data-parallel ranks.
        dp_rank: Number of this rank among them.
        tokenizer: Tokenizer of the text, or the one that made the tokens.
        seq_len: Tokens of a sequence.
        local_batch_size: Sequences of a batch.

    Raises:
        ValueError: The data is missing, or shorter than a sequence.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(titan.HuggingFaceTextDataLoader.Config):
        """``[dataloader]``.

        Attributes:
            dataset: ``packed``, ``stdlib``, a name that torchtitan knows, or the path of a loader's
                class.
            dataset_path: Folder by ``amo tokenize``, or a mixture, such as
                ``data/web=0.7,data/code=0.3``.
            seed: Seeds the order of sequences.
            order: Sequences shuffled in each epoch, or documents by ``amo tokenize --score-field``.
            on_mixture_change: Resume with other corpora or weights: ``error`` stops, ``use_config``
                draws from these from now on, and each known corpus goes on where it was.
            positions: Keep documents from seeing each other; follows from ``model.attention``.
        """

        dataset: str = "c4_test"
        dataset_path: str | None = None
        seed: int = 42
        order: Literal["uniform", "ascend", "descend"] = "uniform"
        on_mixture_change: Literal["error", "use_config"] = "error"
        positions: Annotated[bool, tyro.conf.Suppress] = False

        def build(self, **options: Any) -> BaseDataLoader:
            """The loader, torchtitan's own for its datasets.

            Raises:
                ValueError: For an unknown dataset, or as :class:`PackedLoader`.
            """
            check(self)
            owner: Any = titan.HuggingFaceTextDataLoader
            if self.dataset in DATASETS:
                owner = self._owner
            elif "." in self.dataset:
                owner = import_class(self.dataset, BaseDataLoader, "dataloader.dataset")
            loader: BaseDataLoader = owner(derive(self, owner.Config), **options)
            return loader

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: Tokenizer,
        seq_len: int,
        local_batch_size: int,
        **others: Any,
    ) -> None:
        weights = [weight for _, weight in paths(config)]
        self._mixture = Mixture(weights, config.seed)
        self._corpora = open_corpora(config, tokenizer)
        self._sizes = [max(c.num_tokens - 1, 0) // seq_len for c in self._corpora]
        is_long = min(self._sizes) > 0
        require(is_long, "training.seq_len", seq_len, "less than the tokens of the corpus")
        self._config = config
        self._end = None if config.infinite else self._sizes[0]
        self._batch_size, self._seq_len = local_batch_size, seq_len
        self._rank, self._world = dp_rank, dp_world_size
        self._eos_id = tokenizer.eos_id if config.positions else None
        self._next = 0
        tokens = [[c.digest, w] for c, w in zip(self._corpora, weights, strict=True)]
        self._names = _names(tokens)
        # Sequence at which this mixture began, and by corpus: the place from which on it was unread
        # then, the places before that which were, and the number that makes its order its own.
        self._start = 0
        self._unread: dict[str, int] = {}
        self._left: dict[str, list[int]] = {}
        self._streams = {name: index for index, name in enumerate(self._names)}
        self._source = {
            "tokens": tokens,
            "seq_len": seq_len,
            "seed": config.seed,
            "order": config.order,
        }

    def __iter__(self) -> Iterator[Batch]:
        """Batches ``({"input": (B, S) int64}, labels (B, S) int64)``, until the data ends.

        Where the config asks for ``positions`` the inputs have them too, (B, S) int64 that restart
        after an end token, whose label is ignored. The last batch of data that is read once is
        filled with sequences that no loss counts.

        A thread reads :data:`BATCHES_AHEAD` of them ahead; its errors are raised here. The position
        of :meth:`state_dict` is that of the batch that this iterator returned last.
        """
        batches = IterableWrapper(self._read(self._next))
        ahead = Prefetcher(batches, prefetch_factor=BATCHES_AHEAD, snapshot_frequency=0)
        for batch, self._next in ahead:
            yield batch

    def _read(self, start: int) -> Iterator[tuple[Batch, int]]:
        """Batches from sequence ``start`` on, each with the number of the sequence after it."""
        while True:
            first = start + self._rank * self._batch_size
            stop = start + self._world * self._batch_size
            if self._end is not None and start >= self._end:
                return
            numbers = range(first, first + self._batch_size)
            end = self._end or stop
            tokens = torch.from_numpy(np.stack([self._tokens(min(n, end - 1)) for n in numbers]))
            inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
            batch = {"input": inputs}
            if self._eos_id is not None:
                batch["positions"] = document_positions(inputs, self._eos_id)
                labels[inputs == self._eos_id] = IGNORE_INDEX
            labels[max(0, end - first) :] = IGNORE_INDEX
            start = stop
            yield (batch, labels), stop

    def _tokens(self, number: int) -> Any:
        """Tokens of a sequence of the run, and the token after them."""
        source, place = self._mixture(number - self._start)
        name = self._names[source]
        epoch, place = divmod(self._place(name, place), self._sizes[source])
        if self._config.order == "uniform":
            seeds = self._config.seed, self._streams[name], epoch
            place = shuffled(place, self._sizes[source], *seeds)
        return self._corpora[source].sequence(place, self._seq_len)

    def _place(self, name: str, place: int) -> int:
        """Place of a mixture in a corpus, of which earlier mixtures have read some."""
        left = self._left.get(name, [])
        return left[place] if place < len(left) else self._unread.get(name, 0) + place - len(left)

    def state_dict(self) -> dict[str, Any]:
        """``sequence``, the number of the next one, and ``source``, a JSON string."""
        names = ("start", "unread", "left", "streams")
        mixture = {name: getattr(self, f"_{name}") for name in names}
        source = json.dumps({**self._source, **mixture}, sort_keys=True)
        return {"sequence": self._next, "source": source}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to the position of a checkpoint.

        Raises:
            ValueError: If the checkpoint was made from other data.
        """
        if not state_dict:
            return
        saved = json.loads(state_dict.get("source", "{}"))  # Another loader's has none.
        changed = differences({name: saved.get(name) for name in self._source}, self._source)
        is_mixture = [line.startswith("tokens: ") for line in changed] == [True]
        if changed and not (is_mixture and self._config.on_mixture_change == "use_config"):
            remedy = "dataloader.on_mixture_change = 'use_config' draws from these from now on; "
            raise ValueError(
                f"dataloader: the data is not that of the checkpoint ({'; '.join(changed)}); "
                f"{remedy if is_mixture else ''}"
                "`--checkpoint.exclude_from_loading dataloader` starts the data from the "
                "beginning, which trains on the same documents again"
            )
        self._next = int(state_dict["sequence"])
        names = _names(saved["tokens"])
        # An earlier version knew one mixture a run.
        self._start, self._unread = saved.get("start", 0), saved.get("unread", {})
        self._left = saved.get("left", {})
        streams = {name: index for index, name in enumerate(names)}
        self._streams = saved.get("streams", streams)
        if changed:
            mixture = Mixture([weight for _, weight in saved["tokens"]], self._config.seed)
            left = mixture.left(self._next - self._start)
            for name, (end, places) in zip(names, left, strict=True):
                num_left = len(self._left.get(name, ()))
                places = [self._place(name, place) for place in (*places, *range(end, num_left))]
                self._unread[name] = self._place(name, max(end, num_left))
                self._left[name] = places
            for name in self._names:
                self._streams.setdefault(name, len(self._streams))
            self._start = self._next
            if self._rank == 0:
                logger.warning("another mixture from sequence %d on: %s", self._next, changed[0])


class ValidationLoader(PackedLoader):
    """Batches of held-out data, each sequence once."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(PackedLoader.Config):
        """``[validator.dataloader]``: the fields of ``[dataloader]``."""

        dataset: str = "c4_validation"
        infinite: bool = False


def _names(tokens: Sequence[Sequence[Any]]) -> list[str]:
    """Names of a mixture's corpora: their digests, numbered where one comes again."""
    digests = [digest for digest, _ in tokens]
    counts = [digests[:index].count(digest) for index, digest in enumerate(digests)]
    return [f"{digest}#{n}" if n else digest for digest, n in zip(digests, counts, strict=True)]


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


def open_corpora(config: PackedLoader.Config, tokenizer: Tokenizer) -> list[Corpus]:
    """The corpora of a dataset.

    Raises:
        ValueError: One is missing, damaged, or of another tokenizer.
    """
    if config.dataset == "stdlib":
        return [standard_library(tokenizer)]
    with _named_for(config):
        return [open_packed(path, tokenizer, config.order) for path, _ in paths(config)]


def paths(config: PackedLoader.Config) -> list[tuple[str, float]]:
    """Paths of a dataset with their weights.

    Raises:
        ValueError: One of several has no weight.
    """
    text = config.dataset_path or ""
    # A folder may be named data/lang=en.
    if config.dataset != "packed" or "=" not in text or os.path.exists(os.path.expanduser(text)):
        return [(text, 1.0)]
    parts = [part.strip().rpartition("=") for part in text.split(",")]
    try:
        return [(path, float(weight)) for path, _, weight in parts]
    except ValueError:
        raise ValueError(
            f"dataloader.dataset_path: found {text!r}, expected a folder that exists, or several "
            "with their weights, such as data/web=0.7,data/code=0.3"
        ) from None


def check(config: PackedLoader.Config) -> None:
    """Check what a config says about data, reading none.

    Raises:
        ValueError: Naming the field, what was found and what was expected.
    """
    known = (*DATASETS, *titan.DATASETS)  # torchtitan's own error would name its own alone.
    with _named_for(config):
        if "." in config.dataset:
            import_class(config.dataset, BaseDataLoader, "dataloader.dataset")
        else:
            is_known, expected = config.dataset.lower() in known, f"one of {', '.join(known)}"
            require(is_known, "dataloader.dataset", repr(config.dataset), expected)
            has_order = config.order == "uniform" or config.dataset == "packed"
            expected = f"'uniform' for {config.dataset!r}"
            require(has_order, "dataloader.order", repr(config.order), expected)
        weights = [weight for _, weight in paths(config)]
        Mixture(weights, config.seed)
        is_one, expected = config.infinite or len(weights) == 1, "one where all is read once: "
        expected += "a mixture has no end (validator.steps)"
        require(is_one, "dataloader.dataset_path", "several with weights", expected)


@contextlib.contextmanager
def _named_for(config: PackedLoader.Config) -> Iterator[None]:
    """Name the fields of ``[validator.dataloader]`` in errors as a file names them."""
    try:
        yield
    except ValueError as error:
        if not isinstance(config, ValidationLoader.Config):
            raise
        # The tokenizer and the length of sequences are those of training.
        raise ValueError(re.sub(r"^dataloader\b", "validator.dataloader", str(error))) from None
