"""Text tokenized once: shards of tokens, mapped into memory and read as one row of tokens.

A folder has an ``index.json`` that names the settings, the shards in order, and where the source
goes on after the last of them. Both are replaced as a whole, a shard before the index that names
it: what the index says is always there. Where documents have scores, ``.documents`` beside a shard
holds the number of tokens and the score of each.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torchtitan_ext.runs.files import replace

INDEX = "index.json"
COMMIT = "commit"
"""Setting that names the commit of a dataset on the hub."""

DOCUMENT = np.dtype([("num_tokens", "<i8"), ("score", "<f8")])
"""Record of a document, in the order of the corpus."""

Tokens = npt.NDArray[Any]


@dataclasses.dataclass(slots=True)
class Index:
    """Content of ``index.json``.

    Attributes:
        settings: Settings that decide the tokens: source, tokenizer, fields, type of a token.
        shards: ``name``, ``num_tokens`` and ``sha256`` of each, in order.
        position: Next row of the source: number of its file, and its number there.
        num_rows: Rows read, the bad ones included.
        bad_rows: Rows left out, by reason.
        complete: Whether all of the source is there.
    """

    settings: dict[str, Any]
    shards: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    position: list[int] = dataclasses.field(default_factory=lambda: [0, 0])
    num_rows: int = 0
    bad_rows: dict[str, int] = dataclasses.field(default_factory=dict)
    complete: bool = False

    @property
    def num_tokens(self) -> int:
        """Over all shards."""
        return sum(int(shard["num_tokens"]) for shard in self.shards)


def token_type(vocab_size: int) -> str:
    """The smallest type that holds every token."""
    return "<u2" if vocab_size <= 2**16 else "<u4"


def read_index(folder: Path) -> Index | None:
    """The index of a folder; ``None`` where there is none.

    Raises:
        ValueError: If it cannot be understood.
    """
    try:
        return Index(**json.loads((folder / INDEX).read_text()))
    except FileNotFoundError:
        return None
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{folder / INDEX}: not an index of shards: {error}") from None


def write_index(folder: Path, index: Index) -> None:
    """Replace the index of a folder."""
    replace(folder / INDEX, json.dumps(dataclasses.asdict(index), indent=1))


def write_shard(
    folder: Path, index: Index, tokens: Sequence[Tokens], documents: Sequence[Tokens] = ()
) -> None:
    """Write the next shard, there as a whole or not at all, and note it in ``index``.

    Args:
        folder: Folder of the shards.
        index: Index of the folder, which the caller writes.
        tokens: Pieces of the shard.
        documents: Pieces of the records of its documents, which have scores.
    """
    name = f"shard_{len(index.shards):05d}"
    if documents:
        replace(folder / f"{name}.documents", np.concatenate(documents).tobytes())
    whole = np.concatenate(tokens)
    data = whole.tobytes()
    replace(folder / f"{name}.tokens", data)
    digest = hashlib.sha256(data).hexdigest()
    index.shards.append({"name": name, "num_tokens": len(whole), "sha256": digest})


class Corpus:
    """All folders of shards below one, as one row of tokens.

    Args:
        folder: Folder given to ``amo tokenize``.
        order: ``uniform`` leaves documents where they are; ``ascend`` and ``descend`` sort them by
            score, those of one score in the order of the corpus.

    Attributes:
        settings: Settings that decide all tokens.
        num_tokens: Tokens of all documents, end tokens included.
        digest: Hexadecimal digest of the tokens.

    Raises:
        ValueError: If there are no shards, or they are incomplete or do not belong together.
    """

    def __init__(self, folder: str | Path, order: str = "uniform") -> None:
        root = Path(folder).expanduser()
        folders = sorted(path.parent for path in root.glob(f"**/{INDEX}"))
        if not folders:
            raise ValueError(
                f"dataloader.dataset_path: no {INDEX} in {str(folder)!r}, expected a folder that "
                "`amo tokenize` made"
            )
        indices = [_complete_index(folder) for folder in folders]
        self.settings: Mapping[str, Any] = _common(indices, str(folder))
        named = [
            (f / s["name"], s) for f, i in zip(folders, indices, strict=True) for s in i.shards
        ]
        text = "\0".join(shard["sha256"] for _, shard in named)
        self.digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        type_ = self.settings["token_type"]
        self._shards = [
            _mapped(path.with_suffix(".tokens"), type_, shard["num_tokens"])
            for path, shard in named
        ]
        # Pieces: shards, or documents by their scores. Where each lies, and where it ends.
        sizes = np.array([len(shard) for shard in self._shards], np.int64)
        self._shard_of, self._offsets = np.arange(len(sizes)), np.zeros(len(sizes), np.int64)
        if order != "uniform":
            if not self.settings["score_field"]:
                raise ValueError(
                    f"dataloader.order: found {order!r}, expected 'uniform' for {str(folder)!r}, "
                    "which was tokenized without a dataloader.score_field (`amo tokenize "
                    "--score-field`)"
                )
            sizes = self._sort([path for path, _ in named], order == "descend")
        self._ends = np.cumsum(sizes)
        self.num_tokens = int(sizes.sum())

    def _sort(self, paths: Sequence[Path], descend: bool) -> npt.NDArray[np.int64]:
        documents = [np.fromfile(path.with_suffix(".documents"), DOCUMENT) for path in paths]
        lengths = [records["num_tokens"] for records in documents]
        for path, shard, in_shard in zip(paths, self._shards, lengths, strict=True):
            if (total := in_shard.sum()) != len(shard):
                raise ValueError(f"{path}.documents: found {total} tokens, not {len(shard)}")
        scores = np.concatenate([records["score"] for records in documents])
        places = np.argsort(-scores if descend else scores, kind="stable")
        counts = [len(in_shard) for in_shard in lengths]
        self._shard_of = np.repeat(np.arange(len(counts)), counts)[places]
        starts = [np.cumsum(in_shard) - in_shard for in_shard in lengths]
        self._offsets = np.concatenate(starts)[places]
        return np.asarray(np.concatenate(lengths)[places])

    def num_sequences(self, seq_len: int) -> int:
        """Sequences of ``seq_len`` tokens, each with a label: no token is the label of two."""
        return max(0, (self.num_tokens - 1) // seq_len)

    def sequence(self, number: int, seq_len: int) -> Tokens:
        """The tokens of a sequence and the one that follows it: (seq_len + 1,) int64."""
        start = number * seq_len
        stop = start + seq_len + 1
        parts = []
        piece = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            first = int(self._ends[piece - 1]) if piece else 0
            begin = int(self._offsets[piece]) + start - first
            take = min(stop, int(self._ends[piece])) - start
            parts.append(self._shards[self._shard_of[piece]][begin : begin + take])
            start, piece = start + take, piece + 1
        return np.concatenate(parts).astype(np.int64)


def _mapped(path: Path, type_: str, num_tokens: int) -> Tokens:
    expected = num_tokens * np.dtype(type_).itemsize
    try:
        size = path.stat().st_size
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    if size != expected:
        raise ValueError(f"{path}: found {size} bytes, expected {expected}")
    return np.memmap(path, type_, mode="r")


def _complete_index(folder: Path) -> Index:
    index = read_index(folder)
    if index is None or not index.complete:
        raise ValueError(
            f"{folder}: tokenizing is not complete; the same `amo tokenize` goes on with it"
        )
    return index


def _common(indices: Sequence[Index], folder: str) -> Mapping[str, Any]:
    """Settings that all folders share; a corpus in parts needs every part once."""
    parts = [index.settings.get("part", [0, 1]) for index in indices]
    own = ("part", "documents", COMMIT)
    settings = [{k: v for k, v in index.settings.items() if k not in own} for index in indices]
    if any(other != settings[0] for other in settings):
        raise ValueError(f"{folder}: parts were made with different settings")
    total = max(number for _, number in parts)
    if total > 1 and sorted(parts) != [[part, total] for part in range(total)]:
        numbers = [part for part, _ in sorted(parts)]
        raise ValueError(f"{folder}: found parts {numbers} of {total}, expected each once")
    return settings[0]
