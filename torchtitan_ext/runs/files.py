"""Writing of a run's files: replaced as a whole, or extended by whole lines.

A killed process leaves the old file or the new one; a file of lines may end in a cut line. A
scratch file ``<name>.tmp`` may stay behind until the next write replaces it.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

SCRATCH = ".tmp"
"""Suffix of a scratch file's name."""


def replace(path: Path, content: str | bytes, scratch_suffix: str = SCRATCH) -> None:
    """Write a file as a whole or not at all, even if the power fails.

    Args:
        path: File to create or replace; a symbolic link's target is replaced. A device or pipe,
            such as ``/dev/stdout``, is written to.
        content: Text, encoded as UTF-8, or bytes.
        scratch_suffix: Suffix of the scratch file's name. Processes that may write the same file at
            the same time each need their own.

    Raises:
        OSError: The file cannot be written; an earlier one stays as it is.
    """
    data = content.encode() if isinstance(content, str) else content
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        with _named(path):
            file = os.open(target, os.O_WRONLY | os.O_NONBLOCK)  # fails for a pipe without a reader
            try:
                os.set_blocking(file, True)
                _write(file, data)
            finally:
                os.close(file)
        return
    scratch = target.with_name(target.name + scratch_suffix)
    # Another user of the folder could plant a link of this name to any file.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    # The mode stays, and a new file's follows the mask of the process.
    mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o666
    with _named(path):
        scratch.unlink(missing_ok=True)
        file = os.open(scratch, flags, mode)
        try:
            try:
                _write(file, data)
                # Without it some file systems keep the new name and lose the content.
                os.fsync(file)
            finally:
                os.close(file)
            os.replace(scratch, target)
        except OSError:  # a full disk needs the space
            with contextlib.suppress(OSError):
                os.unlink(scratch)
            raise


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Append whole lines to a file; create a missing one.

    Args:
        path: File of lines.
        lines: Lines without their line ends.

    Raises:
        OSError: The lines cannot be written; the file then ends as before.
    """
    data = "".join(f"{line}\n" for line in lines).encode()
    with _named(path):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            size = os.fstat(file).st_size
            try:
                _write(file, data)
            except OSError:  # a full disk may have taken a part
                os.ftruncate(file, size)
                raise
        finally:
            os.close(file)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Add the file's name to errors, which those of ``os.write`` lack."""
    try:
        yield
    except OSError as error:
        error.filename, error.filename2 = os.fspath(path), None
        raise


def _write(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
