"""Folders of checkpoints: on a file system, or in an object store by the URL that fsspec opens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.dirfs import DirFileSystem


def is_remote(path: object) -> bool:
    """Whether a path is a URL, by PyTorch's own rule."""
    return "://" in str(path)


def join(base: object, folder: object) -> str:
    """Path of a folder below another one; a URL stands for itself."""
    if is_remote(folder):
        return str(folder)
    return f"{base}/{folder}" if is_remote(base) else str(Path(str(base), str(folder)))


def store_of(folder: object) -> Any:
    """The files of a folder by their names, as fsspec has them.

    Args:
        folder: Path, or URL such as ``s3://bucket/run``.

    Raises:
        ValueError: No driver for the URL is known or installed.
    """
    try:
        store, path = url_to_fs(str(folder))
    except (ImportError, ValueError) as error:
        raise ValueError(f"{folder}: {error}") from None
    store.invalidate_cache()  # other processes may have written there
    return DirFileSystem(path, store)
