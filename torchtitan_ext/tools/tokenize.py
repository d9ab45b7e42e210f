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

from torchtitan_ext.runs.files import replace

CHOICES = {
    "--tokenizer": ("hf", "tiktoken", "byte"),
    "--encoding": ("llama3", "gpt2", "cl100k_base", "o200k_base"),
    "--executor": ("local", "slurm", "ray"),
}
OPTIONS = {
    "--tokenizer": ("hf", "kind of the tokenizer, as [tokenizer] kind"),
    "--tokenizer-path": ("", "folder or file of the tokenizer"),
    "--encoding": ("llama3", "pattern and special tokens of tiktoken"),
    "--eos-token": ("", "token after each document"),
    "--pattern": ("", "glob of the files in the folder; else parquet, JSON lines and .txt"),
    "--text-field": ("text", "field with a row's text"),
    "--score-field": ("", "field with a row's score, by which training may order documents"),
    "--max-bad-rows": (0.01, "largest allowed share of rows of a task without usable text"),
    "--executor": ("local", "executor of datatrove"),
}
"""Default value and help by option."""


def tokenize(args: argparse.Namespace, tokenizer: Any) -> None:
    """Have ``datatrove`` run all tasks that are not done.

    Args:
        args: Options of the command.
        tokenizer: ``[tokenizer]``.

    Raises:
        ValueError: For what cannot be read, too many bad rows, or a folder of other settings.
    """
    from datatrove.io import DataFolder

    from torchtitan_ext.data.corpus import SETTINGS, read_settings
    from torchtitan_ext.data.pipeline import FORMATS, BadRows, Rows, Tokens
    from torchtitan_ext.data.tokenizers import identity
    from torchtitan_ext.runs.differences import differences

    if args.tasks is not None and args.tasks < 1:
        raise ValueError(f"--tasks: found {args.tasks}, expected 1 or more")
    source = os.path.expanduser(args.source)
    paths = DataFolder(source).list_files(glob_pattern=args.pattern or None)
    own = f"{os.path.relpath(args.output, source)}/"  # The logs are JSON, too.
    paths = [path for path in paths if args.pattern or path.lower().endswith(FORMATS)]
    paths = [path for path in paths if not path.startswith(own)]
    if not (args.source and paths):
        expected = args.pattern or ", ".join(FORMATS)
        raise ValueError(f"source: found no file in {source!r}, expected a folder of {expected}")
    listing = "".join(f"{path}\n" for path in paths)
    saved = read_settings(args.output)
    num_cores = len(os.sched_getaffinity(0))
    settings = {
        "source": args.source,
        "files": hashlib.sha256(listing.encode()).hexdigest()[:16],
        "tokenizer": identity(tokenizer.build(tokenizer_path=tokenizer.path)),
        "text_field": args.text_field,
        "score_field": args.score_field,
        "tasks": args.tasks or saved.get("tasks") or min(len(paths), num_cores),
    }
    if saved and (changed := differences(saved, settings)):
        path = args.output / SETTINGS
        raise ValueError(f"{path}: was made with other settings ({'; '.join(changed)})")
    args.output.mkdir(parents=True, exist_ok=True)
    replace(args.output / "files.txt", listing)
    replace(args.output / SETTINGS, json.dumps(settings, indent=1))
    logs = str(args.output / "logs")
    pipeline = [
        Rows(source, str(args.output / "files.txt"), args.text_field, args.score_field),
        BadRows(logs, args.max_bad_rows),
        Tokens(args.output, tokenizer, bool(args.score_field)),
    ]
    options: dict[str, Any] = dict(text.split("=", 1) for text in args.executor_option)
    options |= {name: int(value) for name, value in options.items() if value.isdecimal()}
    if args.executor == "slurm":  # The jobs find the programs of datatrove where this one is.
        programs = shlex.quote(str(Path(sys.executable).parent))
        options.setdefault("env_command", f"export PATH={programs}:$PATH")
    elif args.executor == "local":
        options.setdefault("workers", min(settings["tasks"], num_cores))
        # One process uses all cores, and several would take them from one another.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", str(options["workers"] == 1).lower())
    module = importlib.import_module(f"datatrove.executor.{args.executor}")
    executor = getattr(module, f"{args.executor.title()}PipelineExecutor")
    executor(pipeline, tasks=settings["tasks"], logging_dir=logs, **options).run()


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
    for name, (default, text) in OPTIONS.items():
        shown = f"{text} (default %(default)s)" if default else text
        add(name, default=default, type=type(default), choices=CHOICES.get(name), help=shown)
    add("--tasks", type=int, help="tasks that share the files (default: all cores)")
    add(
        "--executor-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="option of datatrove's executor, such as workers=4 or partition=cpu",
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from torchtitan_ext.data.corpus import open_packed
    from torchtitan_ext.data.tokenizers import Tokenizer

    if args.tokenizer == "hf" and not args.tokenizer_path:
        raise ValueError("--tokenizer-path: found none, expected one for 'hf'")
    tokenizer = Tokenizer.Config(
        kind=args.tokenizer,
        path=args.tokenizer_path,
        encoding=args.encoding,
        eos_token=args.eos_token,
    )
    tokenize(args, tokenizer)
    if args.executor == "local":
        built = tokenizer.build(tokenizer_path=args.tokenizer_path)
        print(f"{open_packed(str(args.output), built).num_tokens} tokens")
        print(f'[dataloader] dataset = "packed", dataset_path = "{args.output}"')
    return 0
