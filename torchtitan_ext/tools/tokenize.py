"""``amo tokenize``: a corpus tokenized once, for ``dataloader.dataset = "packed"``.

The files are dealt to tasks, which ``datatrove`` runs on this machine, by Slurm or by Ray. The
tokens of a task depend on its files alone. The same command goes on after the tasks that are done.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from amo_dist.config import require
from torchtitan_ext.runs.files import replace

# Default value, choices and help by option.
OPTIONS: dict[str, tuple[Any, tuple[str, ...] | None, str]] = {
    "--tokenizer": ("hf", ("hf", "tiktoken", "byte"), "kind of the tokenizer"),
    "--tokenizer-path": ("", None, "folder or file of the tokenizer"),
    "--encoding": ("", ("gpt2", "cl100k_base", "o200k_base"), "encoding of tiktoken"),
    "--eos-token": ("", None, "token after each document"),
    "--pattern": ("", None, "glob of the files in the folder; else parquet, JSON lines and .txt"),
    "--text-field": ("text", None, "field with a row's text"),
    "--score-field": ("", None, "field with a row's score, by which training may order documents"),
    "--max-bad-rows": (0.01, None, "largest allowed share of rows of a task without usable text"),
    "--tasks": (0, None, "tasks that share the files; else all cores"),
    "--executor": ("local", ("local", "slurm", "ray"), "executor of datatrove"),
}


def tokenize(args: argparse.Namespace) -> int:
    """Run all tasks that are not done by ``datatrove``.

    Args:
        args: Options of the command.

    Raises:
        ValueError: For what cannot be read, too many bad rows, or a folder of other settings.
    """
    from torchtitan_ext.data.corpus import SETTINGS, open_packed
    from torchtitan_ext.data.pipeline import Rows, Tokens
    from torchtitan_ext.data.tokenizers import Tokenizer
    from torchtitan_ext.runs.records import differences

    require(args.tasks >= 0, "--tasks", args.tasks, "1 or more, or 0 for all cores")
    tokenizer = Tokenizer.Config(
        kind=args.tokenizer,
        path=args.tokenizer_path,
        encoding=args.encoding,
        eos_token=args.eos_token,
    )
    built = tokenizer.build(tokenizer_path=args.tokenizer_path)
    source = args.source
    if "://" not in source:
        source = os.path.abspath(os.path.expanduser(source))
    paths = _files(source, args.output, args.pattern)
    listing = "".join(f"{path}\n" for path in paths)
    file = args.output / SETTINGS
    saved = json.loads(file.read_text()) if file.exists() else {}
    settings = {
        "source": source,
        "files": hashlib.sha256(listing.encode()).hexdigest()[:16],
        "tokenizer": built.identity,
        "text_field": args.text_field,
        "score_field": args.score_field,
        "tasks": args.tasks or saved.get("tasks") or min(len(paths), _num_cores()),
    }
    if saved and (changed := differences(saved, settings)):
        raise ValueError(f"{file}: was made with other settings ({'; '.join(changed)})")
    args.output.mkdir(parents=True, exist_ok=True)
    listed = args.output / "files.txt"
    replace(listed, listing)
    replace(file, json.dumps(settings, indent=1))
    pipeline = [
        Rows(source, str(listed), args.text_field, args.score_field, args.max_bad_rows),
        Tokens(args.output, tokenizer, bool(args.score_field)),
    ]
    module = importlib.import_module(f"datatrove.executor.{args.executor}")
    executor = getattr(module, f"{args.executor.title()}PipelineExecutor")
    # A whole path: fsspec remembers a folder by its text, whatever the working directory.
    logs = os.path.abspath(args.output / "logs")
    options = _executor_options(args.executor, args.executor_option, settings["tasks"])
    executor(pipeline, tasks=settings["tasks"], logging_dir=logs, **options).run()
    if args.executor == "local":
        print(f"{open_packed(str(args.output), built).num_tokens} tokens")
        print(f'[dataloader] dataset = "packed", dataset_path = "{args.output}"')
    return 0


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def _files(source: str, output: Path, pattern: str) -> list[str]:
    """Paths of the files in a folder or URL, without those of the output.

    Raises:
        ValueError: There is none, or the output is the folder itself.
    """
    from datatrove.io import DataFolder

    from torchtitan_ext.data.pipeline import FORMATS

    is_apart = os.path.abspath(output) != source
    require(is_apart, "--output", f"the folder of the source, {source!r}", "another")
    own = f"{os.path.relpath(output, source)}/"  # The logs are JSON, too.
    paths = [
        path
        for path in DataFolder(source).list_files(glob_pattern=pattern or None)
        if not path.startswith(own) and (pattern or path.lower().endswith(FORMATS))
    ]
    expected = f"a folder of {pattern or ', '.join(FORMATS)}"
    require(bool(paths), "source", f"no file in {source!r}", expected)
    return paths


def _executor_options(executor: str, words: list[str], tasks: int) -> dict[str, Any]:
    """Options of an executor: those of the command line, and defaults."""
    options: dict[str, Any] = dict(text.split("=", 1) for text in words)
    options |= {name: int(value) for name, value in options.items() if value.isdecimal()}
    if executor == "slurm":  # The jobs find the programs of datatrove where this one is.
        programs = shlex.quote(str(Path(sys.executable).parent))
        options.setdefault("env_command", f"export PATH={programs}:$PATH")
    elif executor == "local":
        workers = options.setdefault("workers", min(tasks, _num_cores()))
        # One process uses all cores, and several would take them from one another.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", str(workers == 1).lower())
    return options


def add_command(subparsers: Any) -> None:
    """Add ``tokenize`` to a parser's commands."""
    parser = subparsers.add_parser(
        "tokenize",
        help="tokenize a corpus for training, once",
        description="Tokenize a corpus once, for dataloader.dataset = 'packed'. If it was "
        "interrupted, the same command continues it.",
    )
    add = parser.add_argument
    add("source", help="folder of the files, or its URL, such as hf://datasets/OWNER/NAME")
    add("-o", "--output", type=Path, required=True, metavar="DIR", help="folder to write")
    for name, (default, choices, text) in OPTIONS.items():
        shown = f"{text} (default %(default)s)" if default else text
        add(name, default=default, type=type(default), choices=choices, help=shown)
    add(
        "--executor-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="option of datatrove's executor, such as workers=4 or partition=cpu",
    )
    parser.set_defaults(run=tokenize)
