"""``amo tokenize``: a corpus tokenized and packed once, for ``training.dataset = "packed"``.

Documents are packed in the order of the files, an end token after each, and what does not fill the
last sequence is dropped; training shuffles sequences. A killed run goes on after its last shard
when it is started again. ``--part 3/16`` does one of sixteen parts, which may run side by side: of
a dataset on the hub all from the commit of the first.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from amo_dist.tools.command import Subparsers, whole
from torchtitan_ext.data.files import Files, Hub, find_files
from torchtitan_ext.data.packed import COMMIT, INDEX, Index, read_index, write_index, write_shard
from torchtitan_ext.data.rows import BadRows, deal, read_parts, texts
from torchtitan_ext.differences import differences


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """How to tokenize.

    Attributes:
        length: Tokens of a sequence: one more than the model sees, for the labels.
        shard_sequences: Sequences of a shard, the most that a killed run loses.
        text_field: Field of a row that holds the text.
        bad_rows: ``error`` or ``skip``.
        part: Which of ``num_parts`` to do, from 0.
        num_parts: Parts that the rows are dealt to.
    """

    length: int
    shard_sequences: int = 8192
    text_field: str = "text"
    bad_rows: str = "error"
    part: int = 0
    num_parts: int = 1


class Packer:
    """Sequences of one part, from a position on.

    Args:
        files: The corpus.
        tokenizer: Turns text into tokens.
        options: How to tokenize.
        index: What is there already.
    """

    def __init__(self, files: Files, tokenizer: Any, options: Options, index: Index) -> None:
        self._tokenizer = tokenizer
        self._length = options.length
        self._bad = BadRows(options.bad_rows)
        self._bad.counts = dict(index.skipped)
        position = index.position or {"part": 0, "row": 0, "leftover": []}
        self._tokens: list[int] = list(position["leftover"])
        self._position = (position["part"], position["row"])
        parts = deal(range(len(files.urls)), options.part, options.num_parts)
        rows = read_parts(files.urls, parts, (options.text_field,), self._position)
        self._rows = texts(rows, self._bad)

    def take(self, count: int) -> list[list[int]]:
        """The next ``count`` sequences; fewer at the end."""
        found: list[list[int]] = []
        while len(found) < count:
            while len(self._tokens) < self._length:
                row = next(self._rows, None)
                if row is None:
                    return found
                self._position, text = row
                self._tokens += self._tokenizer.encode(text, add_bos=False, add_eos=True)
            found.append(self._tokens[: self._length])
            del self._tokens[: self._length]
        return found

    def record(self, index: Index) -> None:
        """Note in ``index`` where the rows go on, and what was skipped."""
        part, row = self._position
        index.position = {"part": part, "row": row, "leftover": list(self._tokens)}
        index.skipped = dict(self._bad.counts)


def tokenize(
    files: Files, tokenizer: Any, output: Path, options: Options
) -> Iterator[tuple[int, Index]]:
    """Write the shards of one part, and go on where an earlier run stopped.

    Args:
        files: The corpus.
        tokenizer: Turns text into tokens.
        output: Folder of all parts.
        options: How to tokenize.

    Yields:
        After each shard the number of its sequences, and the index; first what is there already.

    Raises:
        ValueError: If the folder holds shards of other settings, or for what cannot be read.
    """
    folder = output / f"part_{options.part:05d}_of_{options.num_parts:05d}"
    folder.mkdir(parents=True, exist_ok=True)
    settings = settings_of(files, tokenizer, options)
    index = read_index(folder) or Index(settings)
    if COMMIT not in index.settings:  # of before, or of files that have none
        settings.pop(COMMIT, None)
    if changed := differences(index.settings, settings):
        raise ValueError(f"{folder / INDEX}: was made with other settings ({'; '.join(changed)})")
    yield index.num_sequences, index
    packer = Packer(files, tokenizer, options, index)
    while not index.complete:
        sequences = packer.take(options.shard_sequences)
        if sequences:
            name = f"shard_{len(index.shards):05d}.bin"
            write_shard(folder, name, sequences)
            index.shards.append({"name": name, "num_sequences": len(sequences)})
        packer.record(index)
        index.complete = len(sequences) < options.shard_sequences
        write_index(folder, index)
        yield len(sequences), index


def settings_of(files: Files, tokenizer: Any, options: Options) -> dict[str, Any]:
    """What the tokens depend on."""
    from torchtitan_ext.data.tokenizers import identity

    return {
        "documents": files.digest,
        "tokenizer": identity(tokenizer),
        "length": options.length,
        "text_field": options.text_field,
        "part": options.part,
        "num_parts": options.num_parts,
        **({COMMIT: files.commit} if files.commit else {}),
    }


def commit_of(output: Path) -> str:
    """Commit of the hub that the parts in a folder are made from; empty where none names one."""
    found = [read_index(path.parent) for path in sorted(output.glob(f"*/{INDEX}"))]
    commits = [str(index.settings.get(COMMIT, "")) for index in found if index is not None]
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


def add_command(subparsers: Subparsers) -> None:
    """Add ``tokenize`` to a parser's commands."""
    parser = subparsers.add_parser(
        "tokenize",
        help="tokenize and pack a corpus once",
        description="Tokenize and pack a corpus once, for training.dataset = 'packed'. Run again, "
        "it goes on where it stopped.",
    )
    parser.add_argument(
        "source", help="folder, file or glob of parquet, JSON lines or Arrow; or a hub dataset"
    )
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--tokenizer", choices=("hf", "tiktoken", "byte"), default="hf")
    parser.add_argument("--tokenizer-path", default="", metavar="PATH", help="folder or file")
    parser.add_argument("--eos-token", default="", help="token after each document")
    size = whole(1, 2**24)
    parser.add_argument("--seq-len", type=size, default=2048, help="training.seq_len (2048)")
    parser.add_argument("--text-field", default="text", help="field of a row (text)")
    parser.add_argument("--bad-rows", choices=("error", "skip"), default="error")
    parser.add_argument("--shard-sequences", type=size, default=8192, metavar="N")
    parser.add_argument("--part", default="0/1", metavar="I/N", help="one of N parts, from 0")
    parser.add_argument("--hub-config", default="", help="subset of a hub dataset")
    parser.add_argument("--split", default="train", help="split of a hub dataset (train)")
    parser.add_argument("--revision", default="", help="commit of a hub dataset (that of DIR)")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from torchtitan_ext.data.tokenizers import make_tokenizer

    progress_bar: Any = importlib.import_module("tqdm").tqdm  # which has no types
    if args.tokenizer != "byte" and not args.tokenizer_path:
        raise ValueError(f"--tokenizer-path: found none, expected one for {args.tokenizer!r}")
    part, num_parts = part_of(args.part)
    revision = args.revision or commit_of(args.output)
    files = find_files(args.source, Hub(args.hub_config, args.split, revision))
    tokenizer = make_tokenizer(args.tokenizer, args.tokenizer_path, args.eos_token)
    options = Options(
        length=args.seq_len + 1,
        shard_sequences=args.shard_sequences,
        text_field=args.text_field,
        bad_rows=args.bad_rows,
        part=part,
        num_parts=num_parts,
    )
    shards = tokenize(files, tokenizer, args.output, options)
    count, index = next(shards)
    # What an earlier run did counts as done, but not for the rate.
    start = {"initial": count * options.length, "desc": f"part {args.part}"}
    with progress_bar(unit=" tokens", unit_scale=True, **start) as bar:
        for count, index in shards:
            bar.update(count * options.length)
            file = index.position["part"] + 1 if index.position else 1
            bar.set_postfix(file=file, shards=len(index.shards), bad=sum(index.skipped.values()))
    print(_summary(index, args.output))
    return 0


def _summary(index: Index, output: Path) -> str:
    tokens = index.num_sequences * int(index.settings["length"])
    skipped = "".join(f", {count} rows {reason}" for reason, count in index.skipped.items())
    return (
        f"{index.num_sequences} sequences, {tokens} tokens in {len(index.shards)} shards"
        f"{skipped}\n"
        f'[training] dataset = "packed", dataset_path = "{output}"'
    )
