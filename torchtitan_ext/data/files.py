"""Files of a corpus: parquet, JSON lines and Arrow, in a folder or of a dataset on the hub."""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

FORMATS = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".arrow": "arrow"}
"""Format by suffix; JSON lines may be compressed, see :data:`COMPRESSIONS`."""

COMPRESSIONS = (".gz", ".zst", ".bz2", ".xz")
"""Suffixes after ``.jsonl``. ``.zst``, that of SlimPajama, needs the package ``zstandard``."""


class DataError(RuntimeError):
    """What could be read cannot be read now: no mistake of the user, and a restart may help."""


@dataclasses.dataclass(frozen=True, slots=True)
class Hub:
    """Which part of a dataset on the hub to read; empty strings stand for the hub's defaults."""

    config: str = ""
    """Name of the subset, such as ``sample-100BT``."""
    split: str = "train"
    """The split."""
    revision: str = ""
    """Commit, tag or branch."""


@dataclasses.dataclass(frozen=True, slots=True)
class Files:
    """Files of rows, in an order that is the same on every rank."""

    urls: tuple[str, ...]
    """Paths, or URLs that ``fsspec`` opens."""
    digest: str
    """Hexadecimal digest of names and, on this machine, sizes; guards a resume."""
    commit: str = ""
    """Commit of a dataset on the hub, which its URLs contain."""


def format_of(url: str) -> str | None:
    """``parquet``, ``jsonl`` or ``arrow`` by the suffix of ``url``; ``None`` for another."""
    name = PurePosixPath(url).name.lower()
    for suffix in COMPRESSIONS:
        if name.endswith(suffix):
            base = FORMATS.get(PurePosixPath(name.removesuffix(suffix)).suffix)
            return base if base == "jsonl" else None
    return FORMATS.get(PurePosixPath(name).suffix)


def find_files(where: str, hub: Hub | None = None) -> Files:
    """The files that ``where`` names.

    Args:
        where: A folder (searched through), a file, a glob, or else the name of a dataset on the
            hub, such as ``HuggingFaceFW/fineweb-edu``.
        hub: What to take of a dataset on the hub.

    Raises:
        ValueError: If nothing is found, or nothing that can be read.
    """
    path = Path(where).expanduser()
    if path.is_dir():
        return _local(sorted(path.rglob("*")), path)
    if path.is_file():
        return _local([path], path.parent)
    if glob.has_magic(where):
        root = Path(str(path).split("*", 1)[0] + "_").parent
        return _local([Path(name) for name in sorted(glob.glob(str(path), recursive=True))], root)
    if not is_on_hub(where):
        raise ValueError(f"training.dataset_path: no such file or folder: {where!r}")
    return hub_files(where, hub or Hub())


def is_on_hub(where: str) -> bool:
    """Whether ``where`` can only be the name of a dataset on the hub."""
    is_name = not where.startswith((".", "/", "~")) and where.count("/") <= 1
    return is_name and not glob.has_magic(where) and not Path(where).exists()


def _local(paths: Sequence[Path], root: Path) -> Files:
    hidden = [any(p.startswith(".") for p in path.relative_to(root).parts) for path in paths]
    kept = [
        path
        for path, skip in zip(paths, hidden, strict=True)
        if not skip and path.is_file() and format_of(path.name)
    ]
    if not kept:
        raise ValueError(
            f"training.dataset_path: found no file in {str(root)!r} that can be read, expected "
            f"{', '.join(FORMATS)} (JSON lines also with {', '.join(COMPRESSIONS)})"
        )
    names = [f"{os.path.relpath(path, root)}\0{path.stat().st_size}" for path in kept]
    return Files(tuple(map(str, kept)), _digest(names))


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
        if _is_outage(error):
            raise DataError(f"cannot find the files of {name!r} on the hub now: {error}") from error
        if not isinstance(error, (OSError, RuntimeError, ValueError)):
            raise
        raise ValueError(
            f"training.dataset_path: found {name!r}, neither a folder here nor a dataset that the "
            f"hub gives: {error}"
        ) from error
    splits = builder.config.data_files or {}
    if hub.split not in splits:
        raise ValueError(f"data.split: found {hub.split!r}, expected one of {sorted(splits)}")
    urls = tuple(url for url in map(str, splits[hub.split]) if format_of(url))
    if not urls:
        raise ValueError(
            f"training.dataset_path: the files of {name!r} are none of {', '.join(FORMATS)}"
        )
    commit = re.match(r"hf://datasets/[^@]+@([0-9a-f]{40})/", urls[0])
    return Files(urls, _digest(urls), commit[1] if commit else "")


def _is_outage(error: BaseException | None) -> bool:
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


def is_commit(revision: str) -> bool:
    """Whether a revision is a commit, and no branch or tag that may come to name another."""
    return re.fullmatch(r"[0-9a-f]{40}", revision) is not None


def _digest(names: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(names).encode()).hexdigest()[:16]
