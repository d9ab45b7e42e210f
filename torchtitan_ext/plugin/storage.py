"""Checkpoints of ``torch.distributed.checkpoint``, checked, and read without running their pickles.

PyTorch saves a checkpoint's metadata, and values that are no tensors, as pickles, and unpickles
them: whoever can write into a run's folder can run code at its next resume. PyTorch also does not
notice a file that was cut, exchanged, or changed in a bit.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import io
import itertools
import json
import logging
import os
import pickle
import posixpath
import re
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem as FsspecFileSystem
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torchtitan_ext.runs import files
from torchtitan_ext.runs.stores import is_remote, store_of

logger = logging.getLogger(__name__)

_DCP = "torch.distributed.checkpoint"
# Names that metadata may contain, by module; dtypes are allowed, too.
_KNOWN = {
    f"{_DCP}.filesystem": {"_StorageInfo"},
    f"{_DCP}.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex"),
        *("StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    # Metadata names the folder of the checkpoint; the module depends on the version of Python.
    "pathlib": {"Path", "PosixPath", "PurePath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePath", "PurePosixPath"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
}


_METADATA = ".metadata"
CHECKSUMS = "checksums.json"
"""File with the size and CRC-32 of every other file, by name; written last."""
_BLOCK = 2**22


class CheckpointWriter(FileSystemWriter):
    """Writes a checkpoint as PyTorch does, and the checksums of its files beside it.

    Pass it to ``torch.distributed.checkpoint.save`` as ``storage_writer``. Each rank reads its
    files back to compute the checksums. PyTorch's own reader can read the checkpoint. While a
    checkpoint is written over, it counts as incomplete.

    Args:
        path: Folder of the checkpoint, or the URL of one that fsspec opens.
        **options: Those of PyTorch's ``FileSystemWriter``, such as ``thread_count``.
    """

    def __init__(self, path: str | os.PathLike[str], **options: Any) -> None:
        super().__init__(path, **{"sync_files": not is_remote(path), **options})
        _use_store(self, path)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Plan the files, see the base class; one rank calls this before any rank writes."""
        delete(self.path, (CHECKSUMS, _METADATA))
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files, see the base class."""
        written = super().write_data(plan, planner)
        sums: dict[str, tuple[int, int]] = {}
        for result in written.wait():
            name = result.storage_data.relative_path
            sums[name] = sums.get(name) or _sum(self.path, name)
            # The result carries the checksum to the rank that calls `finish`.
            result.storage_data.sum = sums[name]
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata, see the base class; checksums come first, in case of a kill."""
        infos = [result.storage_data for result in itertools.chain(*results)]
        sums = {info.relative_path: vars(info).pop("sum") for info in infos}
        self._write_sums(sums)
        super().finish(metadata, results)
        self._write_sums({**sums, _METADATA: _sum(self.path, _METADATA)})

    def _write_sums(self, sums: Mapping[str, tuple[int, int]]) -> None:
        text = json.dumps(dict(sorted(sums.items())), indent=1)
        if is_remote(self.path):  # where an object is there as a whole or not at all
            store_of(self.path).pipe_file(CHECKSUMS, text.encode())
        else:
            files.replace(Path(self.path, CHECKSUMS), text)


def _use_store(own: Any, path: object) -> None:
    """Let a reader or writer of DCP go through fsspec, as DCP's own do, if a path is a URL."""
    if is_remote(path):
        own.fs = FsspecFileSystem()
        own.path = own.fs.init_path(path)


def delete(folder: object, names: Iterable[str]) -> None:
    """Delete files of a folder, as far as they are there."""
    store = store_of(folder)
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            store.rm_file(name)


def _sum(folder: object, name: str) -> tuple[int, int]:
    """Size and CRC-32 of a file."""
    size = crc = 0
    with store_of(folder).open(name, "rb") as stream:
        while block := stream.read(_BLOCK):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return size, crc


def _content(folder: object, name: str) -> bytes:
    store = store_of(folder)
    if store.info(name)["type"] != "file":  # a pipe or a device may never end
        raise OSError(errno.EINVAL, "a pipe, device or folder, expected a file", name)
    return bytes(store.cat_file(name))


def find_damage(folder: object, part: int = 0, num_parts: int = 1) -> str:
    """Damage of the files of a checkpoint, in one line; empty if there is none.

    A checkpoint without `CHECKSUMS`, such as PyTorch's own, cannot be checked.

    Args:
        folder: Folder of the checkpoint.
        part: Index of this rank's share of the files, from 0. Sizes of all files are compared
            whatever the share.
        num_parts: Number of ranks that share the files.
    """
    try:
        for index, (name, (size, crc)) in enumerate(sorted(_read_sums(folder).items())):
            _check_place(CHECKSUMS, name)
            num_bytes = store_of(folder).size(name)
            if num_bytes != size:
                return f"{name} has {num_bytes} bytes, {size} were written"
            if index % num_parts == part and _sum(folder, name) != (size, crc):
                return f"{name} has other bytes than were written"
    except OSError as error:
        return f"{Path(error.filename or str(error)).name}: {error.strerror or 'not found'}"
    except ValueError as error:
        return f"{CHECKSUMS} is damaged: {error}"
    return ""


def _read_sums(folder: object) -> dict[str, tuple[int, int]]:
    """Size and CRC-32 by file; empty without a file of checksums.

    Raises:
        ValueError: The file is damaged.
    """
    file = f"{folder}/{CHECKSUMS}"
    try:
        sums = json.loads(_content(folder, CHECKSUMS))
        return {name: (int(size), int(crc)) for name, (size, crc) in sums.items()}
    except FileNotFoundError:
        return {}
    except (AttributeError, TypeError):
        raise ValueError(f"{file}: found no size and checksum by file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file}: cannot be read: {files.reason(error)}") from None


class CheckpointReader(FileSystemReader):
    """Reads a checkpoint that ``torch.distributed.checkpoint.save`` wrote, as plain data.

    Pass it to ``torch.distributed.checkpoint.load`` as ``storage_reader``. Loading raises
    ``ValueError``, which DCP wraps in its ``CheckpointException``, in four cases: the metadata is
    damaged; it names other classes than DCP's own; ``torch.load(weights_only=True)`` refuses a
    value; or a file lies outside of the checkpoint's folder. Files of a `CheckpointWriter` are
    compared with their checksums before, and the ranks share this work.

    Args:
        path: Folder of the checkpoint, or the URL of one that fsspec opens.
        verify: Whether to compare checksums.

    Attributes:
        error: Reason why the metadata could not be read, which DCP's own error may leave out.
    """

    def __init__(self, path: str | os.PathLike[str], *, verify: bool = True) -> None:
        super().__init__(path)
        _use_store(self, path)
        self._verify = verify
        self.error: Exception | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the metadata, see the base class."""
        try:
            path = str(self._get_metadata_path(kwargs.get("rank")))
            return self._read_metadata(*posixpath.split(path))
        except ValueError as error:
            logger.error("%s", error)  # PyTorch 2.11 reports only that there is no metadata
            self.error = self.error or error
            raise

    def _read_metadata(self, folder: str, name: str) -> Metadata:
        expected = _read_sums(folder).get(_METADATA) if self._verify else None
        path = f"{folder}/{name}"
        # Without this check, a flipped bit in a key would be reported as a missing key.
        try:
            content = _content(folder, name)
            sums = (len(content), zlib.crc32(content))
            if name == _METADATA and expected not in (None, sums):
                raise ValueError("found other bytes than were written")
            metadata = _Unpickler(io.BytesIO(content)).load()
        except FileNotFoundError:
            raise
        except Exception as error:  # damaged bytes can raise any error
            raise ValueError(f"{path}: {_why(error)}") from None
        if not isinstance(metadata, Metadata):
            raise ValueError(f"{path}: found {type(metadata).__name__}, expected Metadata")
        storage: Any = metadata.storage_data or {}
        for place in {info.relative_path for info in storage.values()}:
            _check_place(path, place)
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's part of the data, see the base class."""
        if self._verify:
            group = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
            if damage := find_damage(self.path, *group):
                raise ValueError(f"{self.path}: {damage}")
        for name in {self.storage_data[item.storage_index].relative_path for item in plan.items}:
            if not store_of(self.path).isfile(name):  # a pipe would never end
                raise ValueError(f"{self.path}: found no file {name}")
        return super().read_data(plan, _PlainPlanner(self.path, planner))


class _Unpickler(pickle.Unpickler):
    """Unpickles the classes of metadata and no others."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # Python 3.11.0 to 3.11.3: members of an enum
            return _member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _KNOWN.get(module, ()):
            return super().find_class(module, name)
        raise ValueError(f"found {module}.{name}, expected classes of {_DCP} alone")


def _member(known: Any, name: str) -> Any:
    if isinstance(known, enum.EnumMeta):
        return known[name]
    raise ValueError(f"found an attribute of {known!r}, expected a member of an enum")


class _PlainPlanner(DefaultLoadPlanner):
    """Planner that passes only plain data on to another planner.

    PyTorch's planners unpickle every value that is no tensor, and so would run its code.
    """

    def __init__(self, path: str | os.PathLike[str], planner: LoadPlanner) -> None:
        super().__init__()
        self._path, self._planner = path, planner

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        try:
            torch.load(value, map_location="cpu", weights_only=True)
        except Exception as error:  # damaged bytes can raise any error
            name = read_item.storage_index.fqn
            raise ValueError(f"{self._path}: {name}: {_why(error)}") from None
        value.seek(0)
        self._planner.load_bytes(read_item, value)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        return self._planner.resolve_tensor(read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        self._planner.commit_tensor(read_item, tensor)


def _check_place(path: Any, name: str) -> None:
    if PurePath(name).name != name:
        raise ValueError(f"{path}: found data in {name!r}, expected a file of its folder")


def innermost(error: BaseException) -> str:
    """The failure below all wrappers in one line, and the rank where it happened.

    DCP's own error, which is no ``Exception``, has a traceback for each rank.
    """
    rank = ""
    if isinstance(error, CheckpointException) and error.failures:
        number, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
        rank, error = f" (on rank {number})", cause
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())}{rank}"


def _why(error: Exception) -> str:
    """The error in one line."""
    text = str(error).strip() or type(error).__name__
    if isinstance(error, ValueError) and text.startswith("found "):
        return text
    if isinstance(error, OSError):
        return f"cannot be read: {files.reason(error)}"
    if named := re.search(r"GLOBAL (\S+)", text):  # PyTorch's message for a refused class
        return f"found {named[1]}, expected plain data"
    return f"damaged, or not written by {_DCP}: {text.splitlines()[0]}"
