"""``amo tokenize``: a corpus tokenized once, for ``dataloader.dataset = "packed"``.

Documents follow one another in the order of the files, an end token after each; training cuts them
into sequences of any length. Several processes make the tokens, and their number changes no byte. A
killed run goes on after its last shard when it is started again. ``--part 3/16`` does one of
sixteen parts, a share of the files, which may run on machines side by side: of a dataset on the hub
all from the commit of the first.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import time
from pathlib import Path
from typing import Any

from torchtitan_ext.data.files import Files, Hub, find_files
from torchtitan_ext.tools.command import Subparsers, whole


def commit_of(output: Path) -> str:
    """Commit of the hub that the parts in a folder are made from; empty where none names one."""
    from torchtitan_ext.data.shards import COMMIT, INDEX, read_index

    indices = [read_index(path.parent) for path in sorted(output.glob(f"**/{INDEX}"))]
    commits = [str(index.settings.get(COMMIT, "")) for index in indices if index is not None]
    return next(filter(None, commits), "")


def part_of(text: str) -> tuple[int, int]:
    """``3/16`` as two numbers, the part counted from 0.

    Raises:
        ValueError: For anything but a number from 0 and a larger one.
    """
    part, slash, num_parts = text.partition("/")
    if slash and part.isdecimal() and num_parts.isdecimal() and int(part) < int(num_parts):
        return int(part), int(num_parts)
    raise ValueError(f"--part: found {text!r}, expected such as 0/16, the first, to 15/16")


SAMPLE_BYTES = 2**20
"""Bytes of text from which tokens, disk and time are estimated."""


def estimate(files: Files, tokenizer: Any, output: Path, options: Any, processes: int) -> str:
    """Estimate tokens, disk and time of a corpus from the first rows of its first file.

    Args:
        files: Files of all parts.
        tokenizer: Tokenizer of the corpus.
        output: Folder of the tokens; need not exist.
        options: Options of :func:`torchtitan_ext.data.pack.tokenize`.
        processes: Processes that make tokens.

    Returns:
        A line for a person.
    """
    from torchtitan_ext.data.rows import BadRow, judge, read_rows
    from torchtitan_ext.data.shards import token_type
    from torchtitan_ext.plugin.console import duration

    url = files.urls[options.part]
    num_rows = num_tokens = num_bytes = 0
    start = time.perf_counter()
    for _, row in read_rows(url, options.fields):
        num_rows += 1
        try:
            text, _ = judge(row, options.fields)
        except BadRow:
            text = ""
        num_bytes += len(row) if isinstance(row, bytes) else len(text.encode())
        num_tokens += len(tokenizer.encode(text, add_bos=False, add_eos=True))
        if num_bytes >= SAMPLE_BYTES:
            break
    seconds = time.perf_counter() - start
    urls = files.urls[options.part :: options.num_parts]
    size = file_size(url)
    # Every file of a dataset on the hub would be another request: they are mostly of one size.
    total = size * len(urls) if "://" in url else sum(map(file_size, urls))
    scale = total / size * rows_in(url, size * num_rows / max(num_bytes, 1)) / max(num_rows, 1)
    tokens = num_tokens * scale
    disk = tokens * int(token_type(tokenizer.get_vocab_size())[-1])
    folder = next(path for path in (output.absolute(), *output.absolute().parents) if path.exists())
    free = shutil.disk_usage(folder).free
    line = (
        f"about {tokens:.2g} tokens, {disk / 1e9:.2g} GB on disk of {free / 1e9:.0f} GB free, "
        f"{duration(seconds * scale / processes)} hours in {processes} processes "
        f"(from the first {num_rows:,} rows)"
    )
    return f"{line}; the disk may run full" if disk > free else line


def file_size(url: str) -> int:
    """Size of a file in bytes, as it lies there."""
    fsspec: Any = importlib.import_module("fsspec")  # which has no types
    system, path = fsspec.core.url_to_fs(url)
    return max(int(system.size(path)), 1)


def rows_in(url: str, default: float) -> float:
    """Rows of a parquet file; ``default`` for other formats, which do not count them."""
    from torchtitan_ext.data.files import format_of

    if format_of(url) != "parquet":
        return default
    fsspec: Any = importlib.import_module("fsspec")
    parquet: Any = importlib.import_module("pyarrow.parquet")
    with fsspec.open(url, "rb") as file:
        return float(parquet.ParquetFile(file).metadata.num_rows)


def add_command(subparsers: Subparsers) -> None:
    """Add ``tokenize`` to a parser's commands."""
    parser = subparsers.add_parser(
        "tokenize",
        help="tokenize a corpus for training, once",
        description="Tokenize a corpus once, for dataloader.dataset = 'packed'. If it was "
        "interrupted, the same command continues it.",
    )
    parser.add_argument(
        "source",
        help="folder, file or glob of parquet, JSON lines, Arrow or text; or the name of a dataset "
        "on the Hugging Face hub",
    )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="DIR", help="folder to write"
    )
    parser.add_argument(
        "--tokenizer",
        choices=("hf", "byte"),
        default="hf",
        help="hf: a tokenizer of Hugging Face, in --tokenizer-path; byte: one token per byte "
        "(default %(default)s)",
    )
    parser.add_argument(
        "--tokenizer-path", default="", metavar="PATH", help="folder or file of the tokenizer"
    )
    parser.add_argument("--eos-token", default="", help="token after each document")
    parser.add_argument(
        "--pattern",
        default="",
        help="glob of the files to read in a folder (default: parquet, JSON lines, Arrow and .txt)",
    )
    parser.add_argument(
        "--text-field", default="text", help="field with a row's text (default %(default)s)"
    )
    parser.add_argument(
        "--score-field",
        default="",
        help="field with a row's score, by which training may order rows",
    )
    parser.add_argument(
        "--max-bad-rows",
        type=float,
        default=0.01,
        metavar="SHARE",
        help="largest allowed share of rows without usable text, which are left out "
        "(default %(default)s)",
    )
    size = whole(1, 2**32)
    parser.add_argument(
        "--processes", type=size, help="number of worker processes (default: all cores)"
    )
    parser.add_argument(
        "--shard-tokens",
        type=size,
        default=2**26,
        metavar="N",
        help="tokens per shard (default 2^26)",
    )
    parser.add_argument(
        "--part",
        default="0/1",
        metavar="I/N",
        help="tokenize part I of N, counted from 0 (default 0/1: all)",
    )
    parser.add_argument("--hub-config", default="", help="subset of a hub dataset")
    parser.add_argument(
        "--split", default="train", help="split of a hub dataset (default %(default)s)"
    )
    parser.add_argument(
        "--revision",
        default="",
        help="commit of a hub dataset (default: that of DIR, or else the newest)",
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from torchtitan_ext.data.pack import Options, tokenize, with_bar
    from torchtitan_ext.data.shards import read_index
    from torchtitan_ext.data.tokenizers import Tokenizer

    if args.tokenizer != "byte" and not args.tokenizer_path:
        raise ValueError(f"--tokenizer-path: found none, expected one for {args.tokenizer!r}")
    if not args.source:
        raise ValueError("source: found '', expected a folder, a file, a glob or a hub dataset")
    part, num_parts = part_of(args.part)
    if not 0 <= args.max_bad_rows <= 1:
        raise ValueError(f"--max-bad-rows: found {args.max_bad_rows}, expected a share, 0 to 1")
    revision = args.revision or commit_of(args.output)
    files = find_files(args.source, args.pattern, Hub(args.hub_config, args.split, revision))
    if part >= len(files.urls):
        raise ValueError(f"--part: found {args.part}, expected at most {len(files.urls)} parts")
    section = Tokenizer.Config(kind=args.tokenizer, eos_token=args.eos_token)
    tokenizer = section.build(tokenizer_path=args.tokenizer_path)
    names = ("text_field", "score_field", "max_bad_rows", "shard_tokens")
    fields = {name: getattr(args, name) for name in names}
    options = Options(**fields, part=part, num_parts=num_parts)
    if read_index(args.output) is None:
        processes = args.processes or os.cpu_count() or 1
        print(estimate(files, tokenizer, args.output, options, processes), flush=True)
    shards = tokenize(files, tokenizer, args.output, options, args.processes or 0)
    index = with_bar(shards, args.source if num_parts == 1 else f"{args.source}, part {args.part}")
    bad = "".join(f", {count} rows {reason}" for reason, count in index.bad_rows.items())
    print(f"{index.num_tokens} tokens in {len(index.shards)} shards of {index.num_rows} rows{bad}")
    print(f'[dataloader] dataset = "packed", dataset_path = "{args.output}"')
    return 0
