"""Tokens per second of ``amo tokenize``, beside ``datasets.map`` with the same tokenizer.

``python -m benchmarks.tokenize_speed --megabytes 200`` writes JSON lines of that size, the sources
of the Python standard library again and again, trains a byte-level BPE of 32,000 tokens on a part
of them, and has both tokenize all of it, with one process and with two. Both read the same files,
add an end token to each document and write tokens to disk; ``datasets`` also converts the text to
Arrow before, which counts. At the end ``amo tokenize`` is killed twice on its way, and the bytes
are compared.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import report
from torchtitan_ext.data.files import find_files
from torchtitan_ext.data.shards import read_index

EOS = "<|endoftext|>"
MAP = """
import sys
import datasets
from torchtitan_ext.data.tokenizers import HFTokenizer
folder, tokenizer, output, processes = sys.argv[1:]
rows = datasets.load_dataset("json", data_dir=folder, split="train", cache_dir=output + "/cache")
tokenizer = HFTokenizer(tokenizer)
def encode(row):
    return {"tokens": tokenizer.encode(row["text"], add_eos=True)}
rows.map(encode, num_proc=int(processes), remove_columns=["text"]).save_to_disk(output + "/tokens")
"""


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tokenize_speed", description=__doc__
    )
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--output", type=Path, help="JSON")
    options = parser.parse_args(args)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        corpus, tokenizer = write(root, options.megabytes)
        rows = []
        for processes in (1, 2):
            for name, command in (
                ("amo tokenize", amo(corpus, tokenizer, root / "packed", processes)),
                ("datasets.map", python(corpus, tokenizer, root / "mapped", processes)),
            ):
                shutil.rmtree(root / "mapped", ignore_errors=True)
                start = time.perf_counter()
                subprocess.run(command, check=True, capture_output=True)
                rows.append(
                    {"tool": name, "processes": processes, "s": time.perf_counter() - start}
                )
            index = read_index(root / "packed")
            assert index is not None
            for row in rows[-2:]:
                row["million tokens / s"] = index.num_tokens / row["s"] / 1e6
            (root / "packed").rename(root / f"packed{processes}")
        kills = killed(amo(corpus, tokenizer, root / "packed", 2), rows[2]["s"])
        report("tokenize_speed", rows, options.output, vars(options))
        names = ("packed", "packed1", "packed2")
        first, second, third = (
            {f.name: f.read_bytes() for f in (root / n).iterdir()} for n in names
        )
        is_same = first == second == third
        print(f"{index.num_tokens} tokens; killed {kills} times, same bytes: {is_same}")
    return 0 if is_same else 1


def write(root: Path, megabytes: int) -> tuple[Path, Path]:
    """Folders of the corpus, four files of modules as rows, and of the tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    texts = [Path(url).read_text(errors="ignore") for url in find_files("stdlib").urls]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=32_000, special_tokens=[EOS], show_progress=False
    )
    tokenizer.train_from_iterator(texts[:400], trainer)
    folder = root / "tokenizer"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))
    (root / "corpus").mkdir()
    endless = itertools.cycle(texts)
    for number in range(4):
        size = 0
        with (root / "corpus" / f"{number}.jsonl").open("w") as file:
            while size < megabytes * 250_000:
                size += file.write(json.dumps({"text": next(endless)}) + "\n")
    return root / "corpus", folder


def amo(corpus: Path, tokenizer: Path, output: Path, processes: int) -> list[str]:
    return [
        *(sys.executable, "-m", "torchtitan_ext", "tokenize", str(corpus), "-o", str(output)),
        *("--tokenizer-path", str(tokenizer), "--processes", str(processes)),
        *("--shard-tokens", str(2**22)),
    ]


def python(corpus: Path, tokenizer: Path, output: Path, processes: int) -> list[str]:
    return [sys.executable, "-c", MAP, *map(str, (corpus, tokenizer, output, processes))]


def killed(command: Sequence[str], seconds: float) -> int:
    """Run a command to its end, after it was killed twice on its way; returns how often it was."""
    kills = 0
    for _ in range(2):
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            try:
                process.wait(0.4 * seconds)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                kills += 1
    subprocess.run(command, check=True, capture_output=True)
    return kills


if __name__ == "__main__":
    sys.exit(main())
