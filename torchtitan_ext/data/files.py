"""Files of a corpus: rows or plain text, in a folder or of a dataset on the hub."""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import importlib.util
import os
import re
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

ROWS = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".arrow": "arrow"}
"""Format by suffix; JSON lines may be compressed, see :data:`COMPRESSIONS`."""

COMPRESSIONS = (".gz", ".zst", ".bz2", ".xz")
"""Suffixes after ``.jsonl``. ``.zst``, that of SlimPajama, needs the package ``zstandard``."""


class DataError(RuntimeError):
    """A source does not answer now: no mistake of the user, and a restart may help."""


@dataclasses.dataclass(frozen=True, slots=True)
class Hub:
    """Part of a dataset on the hub to read; empty strings stand for the hub's defaults."""

    config: str = ""
    """Name of the subset, such as ``sample-100BT``."""
    split: str = "train"
    """The split."""
    revision: str = ""
    """Commit, tag or branch."""


@dataclasses.dataclass(frozen=True, slots=True)
class Files:
    """Files of documents, in the order in which they are read."""

    urls: tuple[str, ...]
    """Paths, or URLs that ``fsspec`` opens."""
    digest: str
    """Hexadecimal digest of names and, on this machine, sizes and times of change."""
    commit: str = ""
    """Commit of a dataset on the hub, which its URLs contain."""


def format_of(url: str) -> str:
    """``parquet``, ``jsonl`` or ``arrow`` by the suffix of ``url``; ``text`` for any other."""
    name = PurePosixPath(url).name.lower()
    for suffix in COMPRESSIONS:
        if name.endswith(suffix):
            base = ROWS.get(PurePosixPath(name.removesuffix(suffix)).suffix)
            return "jsonl" if base == "jsonl" else "text"
    return ROWS.get(PurePosixPath(name).suffix, "text")


def find_files(source: str, pattern: str = "", hub: Hub | None = None) -> Files:
    """Files of a corpus.

    Args:
        source: Folder (searched through), a file, a glob, ``stdlib`` for the sources of Python's
            standard library, or else the name of a dataset on the hub, such as
            ``HuggingFaceFW/fineweb-edu``.
        pattern: Files of a folder to take, such as ``**/*.md``; by default rows and ``.txt``.
        hub: Part of a dataset on the hub to take.

    Raises:
        ValueError: If nothing is found, or what would read it is not installed.
        DataError: If the hub does not answer, or asks to come back later.
    """
    path = Path(source).expanduser()
    if source == "stdlib":
        return _standard_library()
    if path.is_dir():
        kept = [
            file
            for file in path.glob(pattern or "**/*")
            if pattern or format_of(file.name) != "text" or file.suffix.lower() == ".txt"
        ]
        return _local(kept, path)
    if path.is_file():
        return _local([path], path.parent)
    if glob.has_magic(source):
        root = Path(str(path).split("*", 1)[0] + "_").parent
        return _local([Path(name) for name in glob.glob(str(path), recursive=True)], root)
    if hub is None or source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise ValueError(f"dataloader.dataset_path: no such file or folder: {source!r}")
    return hub_files(source, hub)


def _standard_library() -> Files:
    """The sources of Python's standard library: real text on every machine.

    Installed packages are left out.
    """
    root = Path(sysconfig.get_path("stdlib"))
    installed = {"site-packages", "dist-packages", "__pycache__"}
    paths = root.glob("**/*.py")
    kept = [file for file in paths if not installed.intersection(file.relative_to(root).parts)]
    return _local(kept, root)


def _local(paths: Iterable[Path], root: Path) -> Files:
    kept = [
        path
        for path in sorted(paths)
        if not any(part.startswith(".") for part in path.relative_to(root).parts)
        and path.is_file()
        and path.stat().st_size  # packages are marked by empty files
    ]
    if not kept:
        raise ValueError(
            f"dataloader.dataset_path: found no file in {str(root)!r} that can be read, expected "
            f"{', '.join(ROWS)} (JSON lines also with {', '.join(COMPRESSIONS)}), .txt, or those "
            "of dataloader.pattern"
        )
    marks = [(os.path.relpath(path, root), path.stat()) for path in kept]
    names = [f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}" for name, stat in marks]
    return _readable(Files(tuple(map(str, kept)), _digest(names)))


def _readable(files: Files) -> Files:
    """Require what decompresses the files: bytes as they lie there would all be bad rows.

    Raises:
        ValueError: Names the package.
    """
    packed = next((url for url in files.urls if url.lower().endswith(".zst")), None)
    if packed is not None and importlib.util.find_spec("zstandard") is None:
        raise ValueError(
            f"{packed}: found no package 'zstandard', expected it for files that end with .zst: "
            "pip install zstandard"
        )
    return files


def hub_files(name: str, hub: Hub) -> Files:
    """The data files of a dataset as ``datasets`` resolves them, none of them downloaded.

    Args:
        name: ``owner/name`` on the hub, or a folder laid out like one.
        hub: Subset, split and revision.

    Raises:
        ValueError: If the dataset, its subset or its split cannot be found.
        DataError: If the hub does not answer, or asks to come back later.
    """
    import datasets

    try:
        builder = datasets.load_dataset_builder(
            name, name=hub.config or None, revision=hub.revision or None
        )
    except Exception as error:  # clients of networks raise what they like
        if is_outage(error):
            raise DataError(f"cannot find the files of {name!r} on the hub now: {error}") from error
        if not isinstance(error, (OSError, RuntimeError, ValueError)):
            raise
        raise ValueError(
            f"dataloader.dataset_path: found {name!r}, neither a folder here nor a dataset "
            f"that the hub gives: {error}"
        ) from error
    splits = builder.config.data_files or {}
    if hub.split not in splits:
        raise ValueError(f"--split: found {hub.split!r}, expected one of {sorted(splits)}")
    urls = tuple(url for url in map(str, splits[hub.split]) if format_of(url) != "text")
    if not urls:
        raise ValueError(
            f"dataloader.dataset_path: the files of {name!r} are none of {', '.join(ROWS)}"
        )
    commit = re.match(r"hf://datasets/[^@]+@([0-9a-f]{40})/", urls[0])
    return _readable(Files(urls, _digest(urls), commit[1] if commit else ""))


def is_outage(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, is that of a server that does not serve now."""
    while error is not None:
        response = getattr(error, "response", None)
        if (status := getattr(response, "status_code", None)) is not None:
            return status in (408, 429) or status >= 500
        if "OfflineModeIsEnabled" in f"{type(error).__name__} {error}":
            return False
        is_client_s = type(error).__module__.partition(".")[0] in ("httpx", "requests")
        if is_client_s or isinstance(error, (ConnectionError, TimeoutError)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _digest(names: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(names).encode()).hexdigest()[:16]
