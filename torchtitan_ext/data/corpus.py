"""Tokens that ``amo tokenize`` wrote, read as one row.

A folder has ``tokenize.json``, the settings, and the files of ``datatrove`` by task: tokens in
``00000_unshuffled.ds``, and in ``.ds.index`` the end of each document, in tokens, as uint64. Where
documents have scores, ``.ds.scores`` holds them as float64.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from amo_dist.config import require
from torchtitan_ext.data.tokenizers import Tokenizer
from torchtitan_ext.runs import files

SETTINGS = "tokenize.json"
OPEN_SHARDS = 128  # files that are open at a time
INDEX_TAIL = 4096  # bytes at the end of an index by which a corpus is known again

Tokens = npt.NDArray[Any]
Numbers = npt.NDArray[np.int64]


def token_type(vocab_size: int) -> str:
    """The smallest type that holds every token, as ``datatrove`` selects it."""
    return "<u2" if vocab_size <= 2**16 else "<u4"


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Documents in shards, as one row of tokens.

    The row has pieces: shards, or documents by their scores.

    Attributes:
        shards: Names of the shards.
        read: Function that returns all tokens of a shard by its place in ``shards``.
        ends: End of each piece in the row, in tokens.
        shard_of: Shard of each piece.
        offsets: Place of each piece in its shard, in tokens.
        digest: Hexadecimal digest that tells the corpus from others.
        vocab_size: Tokens of the tokenizer.
    """

    shards: Sequence[object]
    read: Callable[[int], Tokens]
    ends: Numbers
    shard_of: Numbers
    offsets: Numbers
    digest: str
    vocab_size: int

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents, end tokens included."""
        return int(self.ends[-1]) if len(self.ends) else 0

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


def open_packed(folder: str, tokenizer: Tokenizer, order: str = "uniform") -> Corpus:
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
    try:
        settings = files.read_json(root / SETTINGS)
        made_by, has_scores = settings["tokenizer"], bool(settings["score_field"])
        tasks = range(settings["tasks"])
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"dataloader.dataset_path: found {folder!r}, expected a folder that `amo tokenize` "
            f"made: {error}"
        ) from None
    expected = f"{made_by}, which made the tokens in {folder}"
    require(tokenizer.identity == made_by, "tokenizer.kind", tokenizer.identity, expected)
    sorts, expected = order != "uniform", f"'uniform' for {folder!r}, which was tokenized without "
    expected += "scores (`amo tokenize --score-field`)"
    require(has_scores or not sorts, "dataloader.order", repr(order), expected)
    vocab_size = tokenizer.get_vocab_size()
    type_ = token_type(vocab_size)
    digest = hashlib.sha256(made_by.encode())
    paths, ends_by_shard, scores_by_shard = [], [], []
    for task in tasks:
        path = root / f"{task:05d}_unshuffled.ds"
        ends, scores = _documents(path, np.dtype(type_).itemsize, sorts)
        digest.update(ends[-INDEX_TAIL // 8 :].tobytes())
        if len(ends):  # A task may have no documents.
            paths.append(path)
            ends_by_shard.append(ends)
            scores_by_shard.append(scores)

    @functools.lru_cache(OPEN_SHARDS)
    def read(shard: int) -> Tokens:
        return np.memmap(paths[shard], type_, mode="r")

    shard_of, offsets = np.arange(len(paths)), np.zeros(len(paths), np.int64)
    sizes = np.array([ends[-1] for ends in ends_by_shard], np.int64)
    if sorts:
        scores = np.concatenate(scores_by_shard)
        places = np.argsort(-scores if order == "descend" else scores, kind="stable")
        shard_of = np.repeat(shard_of, [len(ends) for ends in ends_by_shard])[places]
        sizes = np.concatenate([np.diff(ends, prepend=0) for ends in ends_by_shard])[places]
        offsets = np.concatenate(ends_by_shard)[places] - sizes
    name = digest.hexdigest()[:16]
    return Corpus(paths, read, sizes.cumsum(), shard_of, offsets, name, vocab_size)


def _documents(path: Path, token_size: int, whole: bool) -> tuple[Numbers, Tokens]:
    """Ends of a shard's documents, with their scores, if ``whole``; else the last ends."""
    index, scores_file = (path.with_name(f"{path.name}.{name}") for name in ("index", "scores"))
    absent = [file for file in (path, index, *[scores_file] * whole) if not file.is_file()]
    if absent:
        path, problem = absent[0], "no such file"
    else:
        size, index_size = path.stat().st_size, index.stat().st_size
        skipped = 0 if whole else max(0, index_size - INDEX_TAIL)
        ends = np.fromfile(index, "<u8", offset=skipped).astype(np.int64)
        scores = np.fromfile(scores_file, "<f8") if whole else ends
        num_tokens = int(ends[-1]) if len(ends) else 0
        is_whole = size == num_tokens * token_size and index_size % 8 == 0
        if is_whole and len(scores) == len(ends) and (np.diff(ends) > 0).all():
            return ends, scores
        problem = f"{size} bytes, {num_tokens} tokens in its index and {len(scores)} scores"
    done = path.parent / "logs" / "completions" / path.name.partition("_")[0]
    raise ValueError(
        f"{path}: found {problem}, expected a complete file; the same `amo tokenize` makes it, if "
        f"there is no {done}"
    )


def standard_library(tokenizer: Tokenizer) -> Corpus:
    """The sources of Python's standard library: real text on every machine, held in memory.

    Installed packages are left out.
    """
    root = sysconfig.get_path("stdlib")
    texts: list[str] = []
    for path in sorted(Path(root).glob("**/*.py")):
        if not {"site-packages", "dist-packages"}.intersection(path.relative_to(root).parts):
            with contextlib.suppress(UnicodeDecodeError):  # Some tests have other encodings.
                texts.append(path.read_bytes().decode())
    documents = tokenizer.encode_documents([text for text in texts if text.strip()])
    type_ = token_type(tokenizer.get_vocab_size())
    tokens = np.concatenate([np.asarray(document, type_) for document in documents])
    digest = hashlib.sha256(tokens.tobytes()).hexdigest()[:16]
    ends, zero = np.array([len(tokens)]), np.zeros(1, np.int64)
    return Corpus([root], lambda _: tokens, ends, zero, zero, digest, tokenizer.get_vocab_size())
