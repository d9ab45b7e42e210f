"""Tokens that ``amo tokenize`` wrote, read as one row.

A folder has ``tokenize.json``, the settings, and the files of ``datatrove`` by task: tokens in
``00000_unshuffled.ds``, and in ``.ds.index`` the end of each document, in tokens, as uint64. Where
documents have scores, ``.ds.scores`` holds them as float64. A file has its name from the moment it
is complete.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from torchtitan.components.tokenizer import BaseTokenizer

from torchtitan_ext.data.tokenizers import identity

SETTINGS = "tokenize.json"
OPEN_SHARDS = 128
"""Shards that are open at a time, each with one file descriptor."""
INDEX_TAIL = 4096
"""Bytes at the end of an index by which a corpus is known again."""

Tokens = npt.NDArray[Any]


def token_type(vocab_size: int) -> str:
    """The smallest type that holds every token, as ``datatrove`` selects it."""
    return "<u2" if vocab_size <= 2**16 else "<u4"


def shard_path(folder: Path, task: int) -> Path:
    """File with the tokens of a task."""
    return folder / f"{task:05d}_unshuffled.ds"


def read_settings(folder: Path) -> dict[str, Any]:
    """Settings of a folder; empty where there are none.

    Raises:
        ValueError: If they cannot be understood.
    """
    path = folder / SETTINGS
    try:
        return dict(json.loads(path.read_text())) if path.exists() else {}
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: found no settings of `amo tokenize`: {error}") from None


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Documents in shards, as one row of tokens.

    The row has pieces: shards, or documents by their scores.
    """

    shards: Sequence[object]
    """Names of the shards."""
    read: Callable[[int], Tokens]
    """Function that returns all tokens of a shard."""
    sizes: npt.NDArray[np.int64]
    """Tokens of each piece."""
    shard_of: npt.NDArray[np.int64]
    """Shard of each piece."""
    offsets: npt.NDArray[np.int64]
    """Place of each piece in its shard."""
    digest: str
    """Hexadecimal digest that tells the corpus from others."""
    vocab_size: int
    """Tokens of the tokenizer."""

    @functools.cached_property
    def ends(self) -> npt.NDArray[np.int64]:
        """End of each piece in the row."""
        return np.cumsum(self.sizes)

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents, end tokens included."""
        return int(self.sizes.sum())

    def num_sequences(self, seq_len: int) -> int:
        """Sequences of ``seq_len`` tokens, each with a label: no token is the label of two."""
        return max(0, (self.num_tokens - 1) // seq_len)

    def sequence(self, number: int, seq_len: int) -> Tokens:
        """The tokens of a sequence and the one that follows it: (seq_len + 1,) int64.

        Raises:
            ValueError: A token is none of the tokenizer's; names the shard.
        """
        start = number * seq_len
        stop = start + seq_len + 1
        parts = []
        piece = int(np.searchsorted(self.ends, start, side="right"))
        while start < stop:
            first = int(self.ends[piece - 1]) if piece else 0
            begin = int(self.offsets[piece]) + start - first
            take = min(stop, int(self.ends[piece])) - start
            shard = int(self.shard_of[piece])
            part = self.read(shard)[begin : begin + take].astype(np.int64)
            if part.max() >= self.vocab_size:
                raise ValueError(
                    f"{self.shards[shard]}: found token {part.max()}, expected less than "
                    f"{self.vocab_size}: the file is damaged"
                )
            parts.append(part)
            start, piece = start + take, piece + 1
        return np.concatenate(parts)


def open_packed(folder: str, tokenizer: BaseTokenizer, order: str = "uniform") -> Corpus:
    """The corpus in a folder.

    Args:
        folder: Folder given to ``amo tokenize``.
        tokenizer: Tokenizer of the run.
        order: ``uniform`` leaves documents where they are; ``ascend`` and ``descend`` sort them by
            score, those of one score in the order of the corpus.

    Raises:
        ValueError: If there is none, another tokenizer made it, or a shard is missing or damaged.
    """
    root = Path(folder).expanduser()
    settings = read_settings(root)
    if not settings:
        raise ValueError(
            f"dataloader.dataset_path: no {SETTINGS} in {folder!r}, expected a folder that "
            "`amo tokenize` made"
        )
    if (kind := identity(tokenizer)) != settings["tokenizer"]:
        raise ValueError(
            f"tokenizer.kind: found {kind}, expected {settings['tokenizer']}, which made the "
            f"tokens in {folder}"
        )
    sorts = order != "uniform"
    if sorts and not settings["score_field"]:
        raise ValueError(
            f"dataloader.order: found {order!r}, expected 'uniform' for {folder!r}, which was "
            "tokenized without scores (`amo tokenize --score-field`)"
        )
    vocab_size = tokenizer.get_vocab_size()
    type_ = token_type(vocab_size)
    digest = hashlib.sha256(kind.encode())
    paths, ends_by_shard = [], []
    for task in range(settings["tasks"]):
        path = shard_path(root, task)
        ends = _document_ends(path, np.dtype(type_).itemsize, sorts)
        digest.update(ends[-INDEX_TAIL // 8 :].tobytes())
        if len(ends):  # A task may have no documents.
            paths.append(path)
            ends_by_shard.append(ends)

    @functools.lru_cache(OPEN_SHARDS)
    def read(shard: int) -> Tokens:
        return np.memmap(paths[shard], type_, mode="r")

    shard_of = np.arange(len(paths))
    offsets = np.zeros(len(paths), np.int64)
    sizes = np.array([ends[-1] for ends in ends_by_shard], np.int64)
    if sorts:
        scores = np.concatenate(list(map(_scores, paths, ends_by_shard)))
        places = np.argsort(-scores if order == "descend" else scores, kind="stable")
        sizes_by_shard = [np.diff(ends, prepend=0) for ends in ends_by_shard]
        shard_of = np.repeat(shard_of, [len(ends) for ends in ends_by_shard])[places]
        sizes = np.concatenate(sizes_by_shard)[places]
        offsets = np.concatenate(ends_by_shard)[places] - sizes
    return Corpus(paths, read, sizes, shard_of, offsets, digest.hexdigest()[:16], vocab_size)


def _document_ends(path: Path, token_size: int, whole: bool) -> npt.NDArray[np.int64]:
    """The ends of the last documents of a shard, or of all if ``whole``."""
    index = path.with_name(f"{path.name}.index")
    try:
        size, index_size = path.stat().st_size, index.stat().st_size
        skipped = 0 if whole else max(0, index_size - INDEX_TAIL)
        ends = np.fromfile(index, "<u8", offset=skipped).astype(np.int64)
    except OSError as error:
        _fail(Path(error.filename), "no such file")
    num_tokens = int(ends[-1]) if len(ends) else 0
    if size != num_tokens * token_size or index_size % 8 or (np.diff(ends) < 1).any():
        _fail(path, f"{size} bytes, and {num_tokens} tokens in its index")
    return ends


def _scores(path: Path, ends: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    scores = np.fromfile(path.with_name(f"{path.name}.scores"), "<f8")
    if len(scores) != len(ends):
        _fail(path, f"{len(scores)} scores of {len(ends)} documents")
    return scores


def _fail(path: Path, problem: str) -> NoReturn:
    done = path.parent / "logs" / "completions" / path.name.partition("_")[0]
    raise ValueError(
        f"{path}: found {problem}, expected a complete file; the same `amo tokenize` makes it, if "
        f"there is no {done}"
    )


def standard_library(tokenizer: Any) -> Corpus:
    """The sources of Python's standard library: real text on every machine, held in memory.

    Installed packages are left out.
    """
    root, left_out = sysconfig.get_path("stdlib"), {"site-packages", "dist-packages"}
    texts: list[str] = []
    for path in sorted(Path(root).glob("**/*.py")):
        if not left_out.intersection(path.parts[len(Path(root).parts) :]):
            with contextlib.suppress(UnicodeDecodeError):  # Some tests have other encodings.
                texts.append(path.read_bytes().decode())
    texts = [text for text in texts if text and not text.isspace()]
    vocab_size = tokenizer.get_vocab_size()
    type_ = token_type(vocab_size)
    tokens = np.concatenate([np.asarray(d, type_) for d in tokenizer.encode_documents(texts)])
    digest = hashlib.sha256(tokens.tobytes()).hexdigest()[:16]
    zero = np.zeros(1, np.int64)
    sizes = np.array([len(tokens)])
    return Corpus([root], lambda _: tokens, sizes, zero, zero, digest, vocab_size)
