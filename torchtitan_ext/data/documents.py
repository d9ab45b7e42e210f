"""Documents of a corpus, by number: what a stream reads."""

from __future__ import annotations

import glob
import hashlib
import logging
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

logger = logging.getLogger(__name__)


class Documents(Protocol):
    """A corpus whose documents are known by number, the same on every rank."""

    def __len__(self) -> int:
        """Number of documents."""

    def text(self, index: int) -> str | None:
        """Document ``index``, or ``None`` where it is to be left out."""

    def digest(self) -> str:
        """Hexadecimal digest of what the corpus consists of; guards a resume."""


class TextFiles:
    """Files of UTF-8 text, in the order given, each one document.

    Args:
        paths: The files; sizes are read now, text when it is asked for.
        root: Folder relative to which files enter the digest, so that a corpus may move.
        undecodable: ``error``, or ``skip`` to leave out files that cannot be read as UTF-8.

    Attributes:
        num_skipped: How many reads were left out so far.

    Raises:
        ValueError: If there are no files, or one cannot be found.
    """

    def __init__(self, paths: Sequence[Path], root: Path, undecodable: str = "error") -> None:
        if not paths:
            raise ValueError(f"training.dataset_path: found no files in {root}")
        self._paths = list(paths)
        self._undecodable = undecodable
        self.num_skipped = 0
        hasher = hashlib.sha256()
        for path in self._paths:
            try:
                size = path.stat().st_size
            except OSError as error:
                raise ValueError(f"cannot read {path}: {error.strerror}") from None
            hasher.update(f"{os.path.relpath(path, root)}\0{size}\0".encode())
        self._digest = hasher.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._paths)

    def digest(self) -> str:
        """Hexadecimal digest of the files' names and sizes."""
        return self._digest

    def text(self, index: int) -> str | None:
        """The text of file ``index``; ``None`` where it was skipped.

        Raises:
            ValueError: If the file cannot be read as UTF-8 and ``undecodable`` is ``error``.
        """
        path = self._paths[index]
        try:
            return path.read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or f"not UTF-8: {error}"
        if self._undecodable == "error":
            raise ValueError(
                f"cannot read {path}: {reason} (data.undecodable = 'skip' leaves such files out)"
            )
        self.num_skipped += 1
        logger.info("left out %s (%s); %d so far", path, reason, self.num_skipped)
        return None


def text_files(where: str, pattern: str, undecodable: str = "error") -> TextFiles:
    """The files that ``where`` names, sorted.

    Args:
        where: A folder, a file or a glob such as ``corpus/**/*.md``.
        pattern: What to take from a folder.
        undecodable: See :class:`TextFiles`.

    Raises:
        ValueError: If nothing is found.
    """
    path = Path(where).expanduser()
    if path.is_dir():
        found, root = list(path.glob(pattern)), path
    else:
        found = [Path(name) for name in glob.glob(str(path), recursive=True)]
        # The folder above the first wildcard, or above the file.
        root = Path(str(path).split("*", 1)[0] + "_").parent if "*" in str(path) else path.parent
    files = sorted(file for file in found if file.is_file())
    if not files:
        what = f"no file matches {pattern!r}" if path.is_dir() else "no such file or folder"
        raise ValueError(f"training.dataset_path: {what} in {where!r}")
    return TextFiles(files, root, undecodable)


def standard_library() -> TextFiles:
    """The sources of Python's standard library: real text on every machine.

    Installed packages are left out, and so are the few files in other encodings than UTF-8.

    Raises:
        ValueError: If this Python comes without its sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    installed = {"site-packages", "dist-packages", "__pycache__"}
    files = [
        file
        for file in sorted(root.glob("**/*.py"))
        if not installed.intersection(file.relative_to(root).parts)
    ]
    return TextFiles(files, root, undecodable="skip")
