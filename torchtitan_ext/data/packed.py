"""Text tokenized and packed once: shards of 32-bit tokens, mapped into memory.

A folder of shards has an ``index.json`` that names the settings, the shards in order, and where
the source goes on after the last of them. Both are replaced as a whole, a shard before the index
that names it: what the index says is always there.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torchtitan_ext.data.streams import DealtStream, Order, Position
from torchtitan_ext.files import replace

INDEX = "index.json"
COMMIT = "commit"
"""Setting that names the commit of a dataset on the hub; the digest of its files tells as much."""
BYTES = 4
"""Of a token."""


@dataclasses.dataclass(slots=True)
class Index:
    """What ``index.json`` says.

    Attributes:
        settings: What the tokens depend on: source, tokenizer, length of a sequence and so on.
        shards: ``name`` and ``num_sequences`` of each, in order.
        position: Where the source goes on, as its reader understands it.
        skipped: Bad rows left out, by reason.
        complete: Whether all of the source is there.
    """

    settings: dict[str, Any]
    shards: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    position: dict[str, Any] = dataclasses.field(default_factory=dict)
    skipped: dict[str, int] = dataclasses.field(default_factory=dict)
    complete: bool = False

    @property
    def num_sequences(self) -> int:
        """Over all shards."""
        return sum(int(shard["num_sequences"]) for shard in self.shards)

    def digest(self) -> str:
        """Hexadecimal digest of settings and shards."""
        text = json.dumps([self.settings, self.shards], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_index(folder: Path) -> Index | None:
    """The index of a folder; ``None`` where there is none.

    Raises:
        ValueError: If it cannot be understood.
    """
    try:
        record = json.loads((folder / INDEX).read_text())
        record.pop("digest")
        return Index(**record)
    except FileNotFoundError:
        return None
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{folder / INDEX}: not an index of packed shards: {error}") from None


def write_index(folder: Path, index: Index) -> None:
    """Replace the index of a folder."""
    record = {**dataclasses.asdict(index), "digest": index.digest()}
    replace(folder / INDEX, json.dumps(record, indent=1))


def write_shard(folder: Path, name: str, sequences: Sequence[Sequence[int]]) -> None:
    """Write a shard, there as a whole or not at all."""
    tokens = torch.tensor(sequences, dtype=torch.int32)
    replace(folder / name, tokens.numpy().astype("<i4", copy=False).tobytes())


class PackedSequences:
    """Sequences of tokens by number, over all folders of shards below one.

    Args:
        where: The folder given to ``amo tokenize``.

    Raises:
        ValueError: If there are no shards, or they are incomplete or do not belong together.
    """

    def __init__(self, where: str) -> None:
        root = Path(where).expanduser()
        folders = sorted(path.parent for path in root.glob(f"**/{INDEX}"))
        if not folders:
            raise ValueError(
                f"training.dataset_path: no {INDEX} in {where!r}, expected a folder that "
                "`amo tokenize` made"
            )
        indices = [_complete_index(folder) for folder in folders]
        self.settings: Mapping[str, Any] = _common(indices, where)
        self._length = int(self.settings["length"])
        self._digest = hashlib.sha256(
            "\0".join(index.digest() for index in indices).encode()
        ).hexdigest()[:16]
        self._shards = list(self._map(folders, indices))
        counts = [shard.shape[0] for shard in self._shards]
        self._ends = list(itertools.accumulate(counts))

    def _map(self, folders: Sequence[Path], indices: Sequence[Index]) -> Iterator[torch.Tensor]:
        for folder, index in zip(folders, indices, strict=True):
            for shard in index.shards:
                path, rows = folder / shard["name"], int(shard["num_sequences"])
                size, expected = _size(path), rows * self._length * BYTES
                if size != expected:
                    raise ValueError(f"{path}: found {size} bytes, expected {expected}")
                tokens = torch.from_file(
                    str(path), shared=False, size=rows * self._length, dtype=torch.int32
                )
                yield tokens.view(rows, self._length)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, number: int) -> list[int]:
        """The tokens of sequence ``number``."""
        shard = bisect.bisect_right(self._ends, number)
        start = self._ends[shard - 1] if shard else 0
        return list(self._shards[shard][number - start].tolist())

    def digest(self) -> str:
        """Hexadecimal digest of settings and shards; guards a resume."""
        return self._digest

    def check(self, length: int, tokenizer: str) -> None:
        """Require a length of sequences, labels included, and a tokenizer.

        Raises:
            ValueError: Naming the field that differs.
        """
        if length != self._length:
            raise ValueError(
                f"training.seq_len: found {length - 1}, expected {self._length - 1}, the length "
                "of the packed sequences"
            )
        if tokenizer != self.settings["tokenizer"]:
            raise ValueError(
                f"data.tokenizer: found {tokenizer}, expected {self.settings['tokenizer']}, which "
                "made the packed sequences"
            )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None


def _complete_index(folder: Path) -> Index:
    index = read_index(folder)
    if index is None or not index.complete:
        raise ValueError(
            f"{folder}: tokenizing is not complete; the same `amo tokenize` goes on with it"
        )
    return index


def _common(indices: Sequence[Index], where: str) -> Mapping[str, Any]:
    """The settings that all parts share; each part must be there once."""
    settings = [{**index.settings} for index in indices]
    parts = [one.pop("part") for one in settings]
    for one in settings:
        one.pop(COMMIT, None)
    if any(one != settings[0] for one in settings):
        raise ValueError(f"{where}: parts were made with different settings")
    num_parts = settings[0]["num_parts"]
    if sorted(parts) != list(range(num_parts)):
        raise ValueError(f"{where}: found parts {sorted(parts)} of {num_parts}, expected each once")
    return settings[0]


class PackedStream(DealtStream):
    """Every ``num_streams``-th of packed sequences in an order.

    Args:
        sequences: All of them.
        order: Their order in each epoch, shared by the streams of a process.
        number: Which stream this is.
        num_streams: How many there are in the world.
        infinite: Whether to go on after an epoch.
    """

    def __init__(
        self,
        sequences: PackedSequences,
        order: Order,
        number: int,
        num_streams: int,
        infinite: bool = True,
    ) -> None:
        super().__init__(number, num_streams, infinite)
        self._sequences = sequences
        self._order = order
        self._position = Position()

    def __next__(self) -> list[int]:
        """The next sequence.

        Raises:
            StopIteration: At the end of a finite stream.
        """
        position = self._position
        if position.index == self._num_mine(len(self._sequences)):
            if not self._infinite:
                raise StopIteration
            position.epoch += 1
            position.index = 0
        number = self._order(position.epoch)[self.number + position.index * self._num_streams]
        position.index += 1
        position.num_sequences += 1
        return self._sequences[number]

    def load_state(self, state: str) -> None:
        """Go to a position; see :meth:`DealtStream.load_state`."""
        position = self.position_of(state)
        self._check_index(position, self._num_mine(len(self._sequences)), "sequences")
        self._position = position
