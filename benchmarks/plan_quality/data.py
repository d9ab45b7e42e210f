"""Bytes of the sources of Python's standard library, for training and, apart, for validation."""

from __future__ import annotations

import dataclasses
import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

END = 256
"""The token after each document."""
ONE_IN = 10
"""One file in so many, by the hash of its name, is for validation."""
_INSTALLED = {"site-packages", "dist-packages", "__pycache__"}


def standard_library() -> Path:
    """The folder of the standard library."""
    return Path(sysconfig.get_path("stdlib"))


def is_for_validation(name: str) -> bool:
    """Whether a file is kept from training; ``name`` is its path below the root, with slashes."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % ONE_IN == 0


@dataclasses.dataclass(frozen=True, slots=True)
class Corpus:
    """Two streams of tokens, int16, each document followed by `END`.

    Attributes:
        digest: Digest of all names and contents.
    """

    train: Tensor
    validation: Tensor
    digest: str


def load(root: Path) -> Corpus:
    """The ``.py`` files below a folder that are UTF-8, but for installed packages.

    Raises:
        ValueError: There is nothing to train on, or nothing to validate on.
    """
    parts: dict[bool, list[Tensor]] = {False: [], True: []}
    hasher = hashlib.sha256()
    end = torch.tensor([END], dtype=torch.int16)
    for path in sorted(root.glob("**/*.py")):
        name = path.relative_to(root).as_posix()
        is_installed = _INSTALLED.intersection(name.split("/"))
        if is_installed or not path.is_file() or not (text := path.read_bytes()):
            continue
        try:
            text.decode()
        except UnicodeDecodeError:  # some tests have other encodings
            continue
        hasher.update(f"{name}\0{len(text)}\0".encode() + text)
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.int16)
        parts[is_for_validation(name)] += [tokens, end]
    if not all(parts.values()):
        which = "training" if parts[True] else "validation"
        raise ValueError(f"root: found no file for {which} in {root}, expected one")
    train, validation = torch.cat(parts[False]), torch.cat(parts[True])
    return Corpus(train, validation, hasher.hexdigest()[:16])


def batches(
    tokens: Tensor, batch: int, sequence: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless inputs and targets ``(batch, sequence)``, from places drawn by a seed alone."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(sequence + 1)
    while True:
        starts = torch.randint(tokens.numel() - sequence, (batch, 1), generator=generator)
        window = tokens[starts + offsets].long()
        yield window[:, :-1], window[:, 1:]
