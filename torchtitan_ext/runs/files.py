"""Reading of files that may be damaged, and writing of a file as a whole.

A process that is killed while it writes leaves the old file or the new one.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from pathlib import Path
from typing import Any

SCRATCH = ".tmp"
"""Suffix of a scratch file's name."""


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Content of a file.

    Raises:
        OSError: It cannot be read. A pipe or a device is refused: it may never end.
    """
    path = Path(path)
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "a pipe or device, expected a file", str(path))
    return path.read_bytes()


def read_json(path: str | os.PathLike[str]) -> Any:
    """Content of a JSON file.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It cannot be read, or is not JSON; names the file.
    """
    try:
        return json.loads(read_bytes(path))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read: {reason(error)}") from None


def reason(error: Exception) -> str:
    """Reason why a file cannot be read, without its name."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return (isinstance(error, OSError) and error.strerror) or str(error)


def replace(path: Path, content: str | bytes, scratch_suffix: str = SCRATCH) -> None:
    """Write a file as a whole or not at all, even if the power fails.

    Args:
        path: File to create or replace; a symbolic link's target is replaced. A device or pipe,
            such as ``/dev/stdout``, is written to.
        content: Text, encoded as UTF-8, or bytes.
        scratch_suffix: Suffix of the scratch file's name. Processes that may write the same file at
            the same time each need their own.

    Raises:
        OSError: The file cannot be written, which the error names; an earlier one stays as it is.
    """
    data = content.encode() if isinstance(content, str) else content
    target = Path(os.path.realpath(path))
    is_file = target.is_file() or not target.exists()
    scratch = target.with_name(target.name + scratch_suffix) if is_file else target
    try:
        with open(scratch, "wb", opener=_open) as file:
            file.write(data)
            file.flush()
            if is_file:  # else some file systems keep the new name and lose the content
                os.fsync(file.fileno())
        scratch.replace(target)
    except OSError as error:
        if is_file:  # a full disk needs the space
            with contextlib.suppress(OSError):
                scratch.unlink()
        error.filename, error.filename2 = os.fspath(path), None
        raise


def _open(path: str, flags: int) -> int:
    """Open a file; a pipe that nobody reads is an error, where a plain open waits for a reader."""
    file = os.open(path, flags | os.O_NONBLOCK, 0o666)
    os.set_blocking(file, True)
    return file
