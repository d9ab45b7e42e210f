"""How files of a run are written: replaced as a whole, or grown by whole lines.

A process that is killed leaves the old file or the new one, and of a file of lines at most a cut
last one. A scratch file ``<name>.tmp`` may stay behind; the next write takes its place.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

SCRATCH = ".tmp"
"""What the name of a scratch file ends with."""


def replace(path: Path, content: str | bytes) -> None:
    """Write a file that is there as a whole or not at all, also after a power failure.

    Args:
        path: A new file, or one to replace; the target of a symbolic link. What is no file, such as
            ``/dev/stdout``, is written to.
        content: Text, which becomes UTF-8, or bytes.

    Raises:
        OSError: If it cannot be written; an earlier file stays as it is.
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
    scratch = target.with_name(target.name + SCRATCH)
    # Whoever may write to the folder may have made a link of this name, to any file.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    # As an ordinary write would leave it: a new file's by the mask of the process.
    mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o666
    with _named(path):
        scratch.unlink(missing_ok=True)
        file = os.open(scratch, flags, mode)
        try:
            try:
                _write(file, data)
                # Else some file systems keep the new name and lose the content.
                os.fsync(file)
            finally:
                os.close(file)
            os.replace(scratch, target)
        except OSError:  # a full disk needs the space
            with contextlib.suppress(OSError):
                os.unlink(scratch)
            raise


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Append whole lines to a file, which is made where there is none.

    Args:
        path: The file.
        lines: Without their line ends.

    Raises:
        OSError: If they cannot be written; the file then ends where it did.
    """
    data = "".join(f"{line}\n" for line in lines).encode()
    with _named(path):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            size = os.fstat(file).st_size
            try:
                _write(file, data)
            except OSError:  # a full disk takes a part
                os.ftruncate(file, size)
                raise
        finally:
            os.close(file)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Have errors name the file, which those of a write do not."""
    try:
        yield
    except OSError as error:
        error.filename, error.filename2 = os.fspath(path), None
        raise


def _write(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
