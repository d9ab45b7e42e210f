"""``amo tokenize``: a corpus tokenized once, for ``dataloader.dataset = "packed"``.

The files are dealt to tasks, which ``datatrove`` runs on this machine, by Slurm or by Ray. The
tokens of a task depend on its files alone. The same command goes on after the tasks that are done.
"""

from __future__ import annotations

import argparse
import glob
import hashlib
import importlib
import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from torchtitan_ext.runs.files import replace
from torchtitan_ext.tools.command import Subparsers, whole

TASK_BYTES = 2**28
"""Bytes of files for which a task is added by default."""


def list_files(source: str, pattern: str) -> tuple[str, dict[str, int]]:
    """The files of a corpus.

    Args:
        source: Folder (searched through), file or glob, or a URL of one that ``fsspec`` opens.
        pattern: Glob of the files of a folder; empty for those of rows and ``.txt``.

    Returns:
        The folder, and by path in it the size of each file in bytes, sorted by path.

    Raises:
        ValueError: If there is none.
    """
    from torchtitan_ext.data.pipeline import FORMATS

    core: Any = importlib.import_module("fsspec.core")  # It has no types.
    system, root = core.url_to_fs(os.path.expanduser(source).rstrip("/"))
    if not system.isdir(root):
        parts = root.split("/")
        if system.isfile(root):
            count, parts[-1] = len(parts) - 1, glob.escape(parts[-1])
        else:
            count = next((i for i, p in enumerate(parts) if glob.has_magic(p)), len(parts) - 1)
        root, pattern = "/".join(parts[:count]), "/".join(parts[count:])
    if pattern:
        info_by_path = system.glob(f"{glob.escape(root)}/{pattern}", detail=True)
    else:
        info_by_path = system.find(root, detail=True)
    relative = {path.removeprefix(f"{root}/"): info for path, info in sorted(info_by_path.items())}
    sizes = {
        path: int(info["size"])
        for path, info in relative.items()
        if info["type"] == "file" and not any(part.startswith(".") for part in path.split("/"))
        if pattern or path.lower().endswith(FORMATS)
    }
    if not sizes:
        raise ValueError(
            f"source: found no file in {source!r}, expected a folder, a file or a glob of "
            f"{', '.join(FORMATS)}, or of others by --pattern"
        )
    return system.unstrip_protocol(root), sizes


def pinned(source: str) -> str:
    """The URL of a dataset on the hub with its newest commit; any other source as it is."""
    parts = re.fullmatch(r"(hf://datasets/)([^/@]+/[^/@]+)(?:@([^/]+))?(.*)", source)
    if parts is None:
        return source
    scheme, name, revision, path = parts.groups()
    api = importlib.import_module("huggingface_hub").HfApi()
    return f"{scheme}{name}@{api.dataset_info(name, revision=revision).sha}{path}"


def tokenize(source: str, output: Path, tokenizer: Any, args: argparse.Namespace) -> Any:
    """Start the executor of ``datatrove`` on all tasks that are not done.

    Args:
        source: Folder, file, glob or URL.
        output: Folder of the tokens.
        tokenizer: ``[tokenizer]``.
        args: Options of the command.

    Raises:
        ValueError: For what cannot be read, too many bad rows, or a folder of other settings.
    """
    from torchtitan_ext.data.corpus import SETTINGS, read_settings
    from torchtitan_ext.data.pipeline import BadRows, Rows, Tokens
    from torchtitan_ext.data.tokenizers import identity
    from torchtitan_ext.runs.differences import differences

    saved = read_settings(output) or {}
    is_same = saved.get("source") == source
    location = saved["location"] if is_same else pinned(source)
    folder, sizes = list_files(location, args.pattern)
    listing = "".join(f"{path}\n" for path in sizes)
    settings = {
        "source": source,
        "location": location,
        "files": hashlib.sha256(listing.encode()).hexdigest()[:16],
        "tokenizer": identity(tokenizer.build(tokenizer_path=tokenizer.path)),
        "text_field": args.text_field,
        "score_field": args.score_field,
        "tasks": args.tasks
        or saved.get("tasks")
        or min(len(sizes), sum(sizes.values()) // TASK_BYTES + 1),
    }
    if saved and (changed := differences(saved, settings)):
        raise ValueError(
            f"{output / SETTINGS}: was made with other settings ({'; '.join(changed)})"
        )
    logs, paths_file = str(output / "logs"), output / "files.txt"
    output.mkdir(parents=True, exist_ok=True)
    replace(paths_file, listing)
    replace(output / SETTINGS, json.dumps(settings, indent=1))
    pipeline = [
        Rows(folder, str(paths_file), args.text_field, args.score_field),
        BadRows(logs, args.max_bad_rows),
        Tokens(output, tokenizer, bool(args.score_field)),
    ]
    options = dict(map(_option, args.executor_option))
    if args.executor == "local":
        workers = min(args.workers or len(os.sched_getaffinity(0)), settings["tasks"])
        options["workers"] = workers
        # One process uses all cores, and several would take them from one another.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", str(workers == 1).lower())
    elif args.workers:
        options["workers"] = args.workers
    if args.executor == "slurm":
        path = Path(sys.executable).parent  # Where the jobs find the programs of datatrove.
        options.setdefault("env_command", f"export PATH={shlex.quote(str(path))}:$PATH")
    module = importlib.import_module(f"datatrove.executor.{args.executor}")
    executor = getattr(module, f"{args.executor.title()}PipelineExecutor")
    return executor(pipeline, tasks=settings["tasks"], logging_dir=logs, **options).run()


def _option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    return name, int(value) if value.isdecimal() else value


def summary(output: Path, tokenizer: Any) -> str:
    """The result of the tasks that are done, as lines for a person."""
    from torchtitan_ext.data.corpus import open_packed, read_settings

    settings = read_settings(output)
    assert settings is not None
    logs = sorted((output / "logs" / "stats").glob("*.json"))
    if len(logs) < settings["tasks"]:
        return f"{len(logs)} of {settings['tasks']} tasks are done; the same command goes on"
    counts: dict[str, int] = {}
    for log in logs:
        steps = {
            step["name"].rpartition(": ")[2]: step["stats"] for step in json.loads(log.read_text())
        }
        for name, stat in steps["bad rows"].items():
            if name.startswith("dropped_"):
                reason = name.removeprefix("dropped_")
                counts[reason] = counts.get(reason, 0) + stat
    corpus = open_packed(str(output), tokenizer)
    bad = "".join(f", {count} rows {reason}" for reason, count in sorted(counts.items()))
    return (
        f"{corpus.num_tokens} tokens of {settings['tasks']} tasks{bad}\n"
        f'[dataloader] dataset = "packed", dataset_path = "{output}"'
    )


def add_command(subparsers: Subparsers) -> None:
    """Add ``tokenize`` to a parser's commands."""
    parser = subparsers.add_parser(
        "tokenize",
        help="tokenize a corpus for training, once",
        description="Tokenize a corpus once, for dataloader.dataset = 'packed'. If it was "
        "interrupted, the same command continues it.",
    )
    add = parser.add_argument
    add("source", help="folder, file, glob or URL of parquet, JSON lines or text")
    add("-o", "--output", type=Path, required=True, metavar="DIR", help="folder to write")
    add(
        "--tokenizer",
        choices=("hf", "tiktoken", "byte"),
        default="hf",
        help="kind of the tokenizer, as [tokenizer] kind (default %(default)s)",
    )
    add("--tokenizer-path", default="", metavar="PATH", help="folder or file of the tokenizer")
    add("--encoding", default="llama3", help="encoding of tiktoken (default %(default)s)")
    add("--eos-token", default="", help="token after each document")
    add(
        "--pattern",
        default="",
        help="glob of the files to read in a folder (default: parquet, JSON lines and .txt)",
    )
    add("--text-field", default="text", help="field with a row's text (default %(default)s)")
    add(
        "--score-field",
        default="",
        help="field with a row's score, by which training may order documents",
    )
    add(
        "--max-bad-rows",
        type=float,
        default=0.01,
        metavar="SHARE",
        help="largest allowed share of rows without usable text (default %(default)s)",
    )
    size = whole(1, 2**20)
    add("--tasks", type=size, help="tasks that share the files (default: by size)")
    add("--workers", type=size, help="tasks at a time (default: all cores)")
    add(
        "--executor",
        choices=("local", "slurm", "ray"),
        default="local",
        help="executor of datatrove (default %(default)s)",
    )
    add(
        "--executor-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="option of datatrove's executor, such as partition=cpu",
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from torchtitan_ext.data.tokenizers import Tokenizer

    if args.tokenizer == "hf" and not args.tokenizer_path:
        raise ValueError("--tokenizer-path: found none, expected one for 'hf'")
    if not args.source:
        raise ValueError("source: found '', expected a folder, a file, a glob or a URL")
    if not 0 <= args.max_bad_rows <= 1:
        raise ValueError(f"--max-bad-rows: found {args.max_bad_rows}, expected a share, 0 to 1")
    tokenizer = Tokenizer.Config(
        kind=args.tokenizer,
        path=args.tokenizer_path,
        encoding=args.encoding,
        eos_token=args.eos_token,
    )
    tokenize(args.source, args.output, tokenizer, args)
    print(summary(args.output, tokenizer.build(tokenizer_path=args.tokenizer_path)))
    return 0
