"""Writing of a file as a whole: a killed process leaves the old one or the new one."""

from __future__ import annotations

import contextlib
import os
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
        OSError: The file cannot be written, which the error names; an earlier one stays as it is.
    """
    data = content.encode() if isinstance(content, str) else content
    target = Path(os.path.realpath(path))
    is_file = target.is_file() or not target.exists()
    scratch = target.with_name(target.name + scratch_suffix) if is_file else target
    try:
        with scratch.open("wb") as file:
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
