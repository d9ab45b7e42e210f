"""Folders of checkpoints: on a file system, or in an object store by the URL that fsspec opens."""

from __future__ import annotations

import importlib
import posixpath
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias


class Remote:
    """A file or folder of an object store, with those methods of ``Path`` that checkpoints need.

    Args:
        url: Such as ``s3://bucket/run``.

    Raises:
        ValueError: No driver for the URL is known or installed.
    """

    def __init__(self, url: str) -> None:
        url_to_fs: Any = importlib.import_module("fsspec.core").url_to_fs  # untyped
        self._url = url.rstrip("/")
        try:
            self._store, self._path = url_to_fs(self._url)
        except (ImportError, ValueError) as error:
            raise ValueError(f"{self._url}: {error}") from None

    def __str__(self) -> str:
        return self._url

    def __truediv__(self, name: str) -> Remote:
        return Remote(f"{self._url}/{name}")

    @property
    def name(self) -> str:
        """Last part of the URL."""
        return posixpath.basename(self._url)

    @property
    def parent(self) -> Remote:
        """Folder of this one."""
        return Remote(posixpath.dirname(self._url))

    def glob(self, pattern: str) -> list[Remote]:
        """What lies in the folder now, as other processes may have written there."""
        self._store.invalidate_cache()
        return [self / posixpath.basename(p) for p in self._store.glob(f"{self._path}/{pattern}")]

    def exists(self) -> bool:
        """Whether it is there."""
        return bool(self._store.exists(self._path))

    def is_file(self) -> bool:
        """Whether it is an object."""
        return bool(self._store.isfile(self._path))

    def is_dir(self) -> bool:
        """Whether objects lie in it."""
        return bool(self._store.isdir(self._path))

    def stat(self) -> Any:
        """Its size, as ``st_size``."""
        return SimpleNamespace(st_size=self._store.size(self._path))

    def open(self, mode: str) -> Any:
        """Stream of its bytes."""
        return self._store.open(self._path, mode)

    def read_bytes(self) -> bytes:
        """Its content."""
        return bytes(self._store.cat_file(self._path))

    def write_bytes(self, data: bytes) -> None:
        """Replace its content; a store shows an object as a whole or not at all."""
        self._store.pipe_file(self._path, data)

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete it."""
        if not missing_ok or self.exists():
            self._store.rm_file(self._path)


Folder: TypeAlias = "Path | Remote"


def is_remote(path: object) -> bool:
    """Whether a path is a URL, by PyTorch's own rule."""
    return "://" in str(path)


def folder_of(path: object, name: str = "") -> Folder:
    """Folder or file of a path or URL.

    Args:
        path: Folder; if ``name`` is a URL it is left out.
        name: Path in it, or URL.
    """
    if is_remote(name):
        return Remote(name)
    if is_remote(path):
        return Remote(f"{path}/{name}")
    return Path(str(path), name)
