"""Reading checkpoints of ``torch.distributed.checkpoint`` without running what they hold.

PyTorch keeps a checkpoint's metadata, and values that are no tensors, as pickles, and loads them
as such: whoever can write into a run's folder can run code at its next resume.
"""

from __future__ import annotations

import io
import os
import pickle
import re
from pathlib import PurePath
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

_DCP = "torch.distributed.checkpoint"
_KNOWN = {
    f"{_DCP}.filesystem": {"_StorageInfo"},
    f"{_DCP}.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex"),
        *("StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    # The folder it was saved to; the module depends on the version of Python.
    "pathlib": {"Path", "PosixPath", "PurePath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePath", "PurePosixPath"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
}
"""What metadata is made of, by module; and dtypes."""


class CheckpointReader(FileSystemReader):
    """Reads a checkpoint that ``torch.distributed.checkpoint.save`` wrote, as plain data.

    Give it to ``torch.distributed.checkpoint.load`` as ``storage_reader``. Loading raises
    ``ValueError``, which DCP wraps in its ``CheckpointException``, where the metadata is damaged or
    names anything but DCP's own classes, where a value is not what ``torch.load`` takes with
    ``weights_only=True``, or where data lies outside of the checkpoint's folder.

    Args:
        path: The checkpoint's folder, or its URL where ``fsspec`` is installed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        if "://" in str(path):
            from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

            remote = FsspecReader(path)
            self.fs, self.path = remote.fs, remote.path

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """As the base class."""
        path = self._get_metadata_path(kwargs.get("rank"))
        with self.fs.create_stream(path, "rb") as stream:
            try:
                metadata = _Unpickler(stream).load()
            except Exception as error:  # garbage raises whatever its bytes happen to mean
                raise ValueError(f"{path}: {_why(error)}") from None
        if not isinstance(metadata, Metadata):
            raise ValueError(f"{path}: found {type(metadata).__name__}, expected Metadata")
        _check_places(path, metadata)
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """As the base class."""
        checked: Any = _CheckedPlanner(self.path, planner)
        return super().read_data(plan, checked)


class _Unpickler(pickle.Unpickler):
    """Knows the classes of metadata alone."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _KNOWN.get(module, ()):
            return super().find_class(module, name)
        raise ValueError(f"found {module}.{name}, expected classes of {_DCP} alone")


class _CheckedPlanner:
    """A planner that gets no bytes which would run code: planners of PyTorch unpickle them."""

    def __init__(self, path: str | os.PathLike[str], planner: LoadPlanner) -> None:
        self._path, self._planner = path, planner

    def load_bytes(self, item: ReadItem, value: io.BytesIO) -> None:
        try:
            torch.load(value, map_location="cpu", weights_only=True)
        except Exception as error:  # garbage raises whatever its bytes happen to mean
            name = item.storage_index.fqn
            raise ValueError(f"{self._path}: {name}: {_why(error)}") from None
        value.seek(0)
        self._planner.load_bytes(item, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)


def _check_places(path: Any, metadata: Metadata) -> None:
    storage: Any = metadata.storage_data or {}
    for found in {info.relative_path for info in storage.values()}:
        if PurePath(found).name != found:
            raise ValueError(f"{path}: found data in {found!r}, expected a file of its folder")


def _why(error: Exception) -> str:
    """One line of what is wrong."""
    text = str(error).strip() or type(error).__name__
    if isinstance(error, ValueError) and text.startswith("found "):
        return text
    if named := re.search(r"GLOBAL (\S+)", text):  # as PyTorch refuses a class
        return f"found {named[1]}, expected plain data"
    return f"damaged, or not written by {_DCP}: {text.splitlines()[0]}"
